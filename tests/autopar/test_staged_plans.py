"""Plans with stages: saved, read, explained, compared and drawn as other plans are."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import PlanError, PlanFormatError
from autopar.plan_entries import plan_json_text
from autopar.planner.cut_answers import CutAnswers, without_place
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


def test_a_cut_and_a_schedule_say_why() -> None:
    plan = autopar.make_plan(deep(), MESH, example_inputs=torch.ones(8, 8))
    text = plan.explain("stage *")
    assert text.startswith("stage 0: begins with the inputs") and "stage 1: begins before `" in text
    assert "why this cut: " in text and ("without it, the best is to cut before `" in text or "takes no longer" in text)
    assert "more a step" in plan.explain("schedule") and "stage" not in plan.explain("schedule").splitlines()[0]
    loaded = autopar.Plan.from_json(plan.to_json())
    assert "not told why: that needs the model" in loaded.explain("stage 1")
    followed = autopar.make_plan(deep(), MESH, example_inputs=torch.ones(8, 8), plan=loaded)
    assert followed.explain("stage 1") == plan.explain("stage 1")


def test_without_a_place_its_two_segments_are_one() -> None:
    cutting = autopar.make_plan(deep(), MESH, example_inputs=torch.ones(8, 8), microbatches=2).cutting
    assert isinstance(cutting, CutAnswers)
    table = cutting.search.segments(2)
    fewer = without_place(table, 1)
    assert len(fewer.cuts) == len(table.cuts) - 1 and table.cuts[1] not in fewer.cuts
    for name in ("forward_s", "backward_s", "fixed_bytes", "saved_bytes", "sync_s"):
        assert getattr(fewer, name).sum() == pytest.approx(getattr(table, name).sum())
        assert len(getattr(fewer, name)) == len(fewer.cuts) + 1
    best = cutting.search.proposed(table, 2, cutting.schedule, 2)
    assert cutting.chosen is not None and best.step_s == pytest.approx(cutting.chosen.step_s)
    place = table.cuts.index(cutting.cuts[0])
    other = cutting.search.proposed(without_place(table, place), 2, cutting.schedule, 2)
    assert cutting.cuts[0] not in other.cuts and other.step_s >= best.step_s * (1 - 1e-9)


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))


def test_what_stages_hold_on_the_host_is_that_of_the_fullest_rank() -> None:
    hosted = partial(autopar.optim.HostState, optimizer=torch.optim.AdamW)
    plan = autopar.make_plan(deep(), MESH, example_inputs=torch.ones(8, 8), search="ddp", optimizer=hosted)
    states = [2 * 4 * sum(size for _, size in group) for group in _sizes(plan)]
    assert plan.host_bytes == max(states) > 0


def _sizes(plan: autopar.Plan) -> list[list[tuple[str, int]]]:
    """Parameters of each stage, with their numbers of elements."""
    known = {name: item.numel() for name, item in deep().named_parameters()}
    return [[(name, known[name]) for name in stage.parameters] for stage in plan.stages]
