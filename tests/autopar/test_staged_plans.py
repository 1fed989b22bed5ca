"""Plans with stages: saved, read, explained, compared and drawn as other plans are."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import PlanError, PlanFormatError
from autopar.plan_entries import plan_json_text
from autopar.report.page import report_page

MESH = autopar.Mesh((2, 2), ("pp", "dp"), hardware="cpu")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


@cache
def made() -> autopar.Plan:
    return autopar.make_plan(model(), MESH, example_inputs=torch.ones(8, 8), microbatches=2)


def test_a_saved_plan_with_stages_reads_as_it_was_and_is_followed_without_a_note(tmp_path: Path) -> None:
    made().save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert str(loaded) == str(made()) and loaded.hash == made().hash
    assert loaded.pipeline == made().pipeline and len(loaded.stages) == 2
    for ours, theirs in zip(made().stages, loaded.stages, strict=True):
        assert ours.plan.details == theirs.plan.details
        assert {entry.key: entry for entry in ours.plan.entries} == {entry.key: entry for entry in theirs.plan.entries}
    assert json.loads(plan_json_text(made().to_json())) == made().to_json()
    followed = autopar.make_plan(model(), MESH, example_inputs=torch.ones(8, 8), plan=loaded)
    assert (followed.hash, followed.notes) == (made().hash, ())


def test_a_plan_with_stages_of_schema_2_is_read() -> None:
    data = made().to_json()
    for part in (data, *(stage["plan"] for stage in data["pipeline"]["stages"])):
        part["schema"] = 2
        for section in ("costs", "frontier", "details"):
            del part[section]
    assert autopar.Plan.from_json(data).hash == made().hash


def test_an_edited_stage_has_no_number_of_before() -> None:
    data = made().to_json()
    data["pipeline"]["microbatches"] = 4
    edited = autopar.Plan.from_json(data)
    assert "not priced" in str(edited) and not any(stage.forward_s or stage.plan.step_s for stage in edited.stages)
    (note,) = autopar.make_plan(model(), MESH, example_inputs=torch.ones(8, 8), plan=edited).notes
    assert "its decisions were edited" in note
    data["pipeline"]["stages"][1]["number"] = 7
    with pytest.raises(PlanFormatError, match="stage 7 stands at place 1"):
        autopar.Plan.from_json(data)


def test_stages_answer_for_themselves() -> None:
    text = made().explain("2.weight")
    assert text.startswith("stage 1, one microbatch:\n2.weight") and "what else there was" in text
    assert "nothing in the plan matches" in made().explain("no.such")
    assert [item.to_json()["stage"] for item in made().explanations("2.weight")] == [1]
    for question in (lambda: made().frontier, made().simulate):
        with pytest.raises(PlanError, match="this plan has stages"):
            question()
    with pytest.raises(PlanError, match="this plan has stages") as caught:
        made().what_if(pin={"2.weight": "R"})
    assert "plan.stages[0].plan" in caught.value.fix
    stage = made().stages[1].plan
    assert stage.what_if(pin={"2.weight": "S0"}).matching("2.weight")[0].words == "S0"
    with pytest.raises(PlanError, match="alone"):
        stage.what_if(batch=16)


def test_a_plan_with_stages_is_compared_and_drawn() -> None:
    assert "the decisions are the same" in made().diff(made())
    single = autopar.make_plan(model(), MESH.shape, example_inputs=torch.ones(8, 8), hardware="cpu", search="ddp")
    assert "stages: none -> 2 from the first op" in single.diff(made())
    page = report_page(made())
    assert "Stage 1" in page and "2 microbatches" in page
