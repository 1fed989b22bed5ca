"""Two hundred mutated plan files: a clear error, or a plan that is read without harm and followed rightly."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError, PlanError, PlanFormatError
from autopar.plan import SCHEMA
from autopar.report.memory import memory_text

FILES = 200
MESH = autopar.Mesh((2, 2), hardware="cpu")
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 7, 1e300, float("inf"), float("nan"), "", "R,R", "S0,S0", "keep", "<script>alert(1)</script>",
    "\ud800", [], {}, [[0]], {"x": 1}, 10**400, "__import__('os').system('true')",
)  # fmt: skip


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def inputs() -> torch.Tensor:
    return torch.ones(8, 8)


@cache
def text() -> str:
    plan = autopar.make_plan(model(), MESH, example_inputs=inputs(), search="megatron")
    _ = plan.frontier
    return json.dumps(plan.to_json())


def mutated(chosen: random.Random) -> str:
    """One to three values, at any depth, gone, doubled, swapped or odd; or the text itself cut or changed."""
    if chosen.random() < 0.15:
        place = chosen.randrange(len(text()))
        return text()[:place] + chosen.choice(["", '"', "}", "\x00", "e9"]) + text()[place + chosen.randrange(9) :]
    data = json.loads(text())
    for _ in range(chosen.randrange(1, 4)):
        holder, key = chosen.choice(list(places(data)))
        if chosen.random() < 0.2:
            del holder[key]
        elif isinstance(holder, dict) and chosen.random() < 0.2:
            holder[chosen.choice(["", "x.[0-99999999]", "0.weight", "no.such/op#0", "[0-1].weight"])] = holder[key]
        else:
            holder[key] = chosen.choice(ODD)
    return json.dumps(data)


def places(data: Any) -> Any:
    """(holder, key) of every value."""
    items = list(data.items()) if isinstance(data, dict) else list(enumerate(data)) if isinstance(data, list) else []
    for key, value in items[:60]:
        yield data, key
        yield from places(value)


def test_no_mutated_file_gives_a_traceback_or_a_wrong_run(tmp_path: Path) -> None:
    path, chosen = tmp_path / "plan.json", random.Random(5)
    loaded: dict[str, autopar.Plan] = {}
    refused = 0
    for _ in range(FILES):
        path.write_text(mutated(chosen), encoding="utf-8")
        try:
            plan = autopar.Plan.load(path)
        except PlanFormatError as error:
            assert "plan.json" in error.where and error.fix
            refused += 1
            continue
        assert str(plan) and plan.explain("*") and plan.diff(plan)
        if plan.details and plan.details.timeline:
            assert "largest tensors" in memory_text(plan)
        loaded[repr((plan.mesh_shape, plan.model_hash, plan.entries))] = plan
    followed = 0
    for plan in list(loaded.values())[:25]:
        try:
            assert autopar.verify(model(), MESH, example_inputs=inputs(), plan=plan).ok
            followed += 1
        except AutoparError as error:
            assert isinstance(error, PlanError) and error.fix
    assert refused > 60 and followed


def test_a_plan_of_an_older_schema_is_read_as_what_it_says(tmp_path: Path) -> None:
    data = json.loads(text())
    for section in ("costs", "frontier", "details"):
        del data[section]
    data["schema"] = 2
    del data["predicted"]["alternatives"]
    second = autopar.Plan.from_json(data)
    assert second.hash == autopar.Plan.from_json(json.loads(text())).hash and not second.notes
    data["schema"] = 1
    del data["residency"], data["predicted"]["recompute_s"], data["without_rule"]
    first = autopar.Plan.from_json(data)
    assert [entry.words for entry in first.entries] == [entry.words for entry in second.entries]
    assert first.to_json()["schema"] == SCHEMA


def test_a_saved_plan_reads_as_it_printed(tmp_path: Path) -> None:
    made = autopar.make_plan(model(), MESH, example_inputs=inputs(), search="fsdp")
    made.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert sorted(str(loaded).splitlines()) == sorted(str(made).splitlines())
    assert loaded.details == made.details
    assert {entry.key: entry for entry in loaded.entries} == {entry.key: entry for entry in made.entries}


def test_costs_of_other_circumstances_are_computed_again_and_it_is_said(tmp_path: Path) -> None:
    made = autopar.make_plan(model(), MESH, example_inputs=inputs(), search="ddp")
    made.save(tmp_path / "plan.json")

    def followed(path: Path = tmp_path / "plan.json", batch: int = 8, hardware: str = "cpu") -> autopar.Plan:
        mesh = autopar.Mesh((2, 2), hardware=hardware)
        return autopar.make_plan(model(), mesh, example_inputs=torch.ones(batch, 8), plan=path)

    assert followed().notes == ()
    (batch,) = followed(batch=64).notes
    assert "since it was made for other shapes of inputs: step" in batch
    (device,) = followed(hardware="h100").notes
    assert "priced for hardware cpu, this is h100" in device
    data = made.to_json()
    data["version"] = "0.0.1"
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert "priced for autopar 0.0.1" in followed(tmp_path / "old.json").notes[0]
    data = made.to_json()
    data["predicted"]["step_s"] *= 2
    (tmp_path / "lie.json").write_text(json.dumps(data))
    assert "not those of these prices" in followed(tmp_path / "lie.json").notes[0]


def test_an_edited_plan_has_no_number_of_before(tmp_path: Path) -> None:
    data = json.loads(text())
    name = next(iter(data["parameters"]))
    data["parameters"][name] = "S0,R" if data["parameters"][name] != "S0,R" else "R,R"
    edited = autopar.Plan.from_json(data)
    assert (edited.step_s, edited.peak_bytes, edited.details, dict(edited.memory)) == (0.0, 0, None, {})
    assert not any(entry.total_s or entry.bytes for entry in edited.entries)
    assert "not priced" in str(edited)
    (note,) = autopar.make_plan(model(), MESH, example_inputs=inputs(), plan=edited).notes
    assert note == "time, memory and costs were computed again, since its decisions were edited"


@pytest.mark.parametrize(
    "costs",
    [
        {"seconds": float("nan")}, {"seconds": -1}, {"moves": [["all_reduce", 7, 1, 1.0, 0]]}, {"moves": [[]]},
        {"bytes": "1"}, {"where": 3},
    ],
)  # fmt: skip
def test_costs_that_are_none_are_refused_and_named(costs: dict[str, Any]) -> None:
    data = json.loads(text())
    name = next(iter(data["costs"]))
    data["costs"][name] |= costs
    with pytest.raises(PlanFormatError) as caught:
        autopar.Plan.from_json(data)
    assert caught.value.where.startswith("costs: ")
