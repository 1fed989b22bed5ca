"""Plans: read, saved, edited, pinned, explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import ConstraintError, PlanError, PlanFormatError
from autopar.sharding.layout import format_layout

MESH = autopar.Mesh((2, 2), ("dp", "tp"), hardware="cpu")
BATCH = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Deep(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def deep() -> nn.Module:
    torch.manual_seed(0)
    return Deep()


def plan(**options: Any) -> autopar.Plan:
    return autopar.make_plan(deep(), MESH, example_inputs=BATCH, **options)


def layout(plan: autopar.Plan, key: str) -> str:
    return next(format_layout(entry.outputs[0]) for entry in plan.entries if entry.key == key)


def test_a_saved_plan_loads_equal_and_is_priced_the_same_when_it_is_followed(tmp_path: Path) -> None:
    made = plan(search="fsdp", optimizer=torch.optim.AdamW)
    made.save(tmp_path / "p.json")
    loaded = autopar.Plan.load(tmp_path / "p.json")
    assert (loaded.hash, loaded.step_s, loaded.peak_bytes, loaded.notes) == (
        made.hash,
        made.step_s,
        made.peak_bytes,
        (),
    )
    followed = plan(plan=loaded, optimizer=torch.optim.AdamW)
    assert (followed.hash, followed.step_s, followed.peak_bytes) == (made.hash, made.step_s, made.peak_bytes)


def test_repeated_layers_are_one_line_of_the_file_and_of_the_table() -> None:
    made = plan(search="ddp")
    assert made.to_json()["parameters"]["layers.[0-2].up.weight"] == "R,R"
    assert "layers.[1-2].up  x2" in str(made)  # the first has one gradient fewer to compute


def test_an_edited_plan_says_so_is_priced_anew_and_computes_the_same(tmp_path: Path) -> None:
    made = plan(search="ddp")
    data = made.to_json()
    data["parameters"]["layers.[0-2].up.weight"] = "R,S0"
    (tmp_path / "p.json").write_text(json.dumps(data))
    edited = autopar.Plan.load(tmp_path / "p.json")
    assert any("edited" in note for note in edited.notes)
    priced = plan(plan=edited)
    assert layout(priced, "layers.1.up.weight") == "R,S0"
    assert priced.step_s > made.step_s
    assert priced.memory["parameter"] < made.memory["parameter"]
    assert autopar.verify(deep(), MESH, example_inputs=BATCH, plan=edited).ok


def test_an_edit_that_no_rule_allows_is_refused_with_what_the_rules_allow(tmp_path: Path) -> None:
    data = plan(search="ddp").to_json()
    data["ops"]["layers.[0-2].up/addmm#0"] = "R,R R,R R,R -> S0,R"
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match=r"layers\.0\.up/addmm#0 cannot be laid out") as caught:
        plan(plan=tmp_path / "p.json")
    assert "S0,R" in caught.value.fix


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "something"), ("schema", 99), ("mesh", {"shape": [0], "axes": ["a"], "hardware": "cpu"}),
        ("mesh", []), ("parameters", {"w": 3}), ("parameters", {"w": "S0"}), ("ops", {"w": "S0,R"}),
        ("ops", {"w[1-0]": "->"}), ("model", None), ("predicted", {"step_s": "fast"}), ("inputs", {"x": "Q,R"}),
    ],
)  # fmt: skip
def test_a_broken_file_is_refused_and_named(tmp_path: Path, field: str, value: Any) -> None:
    data = plan(search="ddp").to_json() | {field: value}
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(PlanFormatError) as caught:
        autopar.Plan.load(tmp_path / "p.json")
    assert "p.json" in caught.value.where


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00\xff", "null", "3"])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(PlanFormatError):
        autopar.Plan.load(tmp_path / "p.json")


def test_pins_bind_what_they_name_and_nothing_else() -> None:
    pinned = plan(constraints={"layers.1.up.weight": "R,S0", "input:0": "S0,R", "layers.0.down/addmm#0": "S0,R"})
    assert layout(pinned, "layers.1.up.weight") == "R,S0"
    assert layout(pinned, "input:0") == "S0,R"
    assert layout(pinned, "layers.0.down/addmm#0") == "S0,R"
    free = plan()
    assert layout(pinned, "layers.2.up.weight") == layout(free, "layers.2.up.weight")
    assert pinned.step_s >= free.step_s
    assert autopar.verify(deep(), MESH, example_inputs=BATCH, plan=pinned).ok


def test_patterns_pin_every_layer() -> None:
    pinned = plan(constraints=[autopar.Constraint("*.down.weight", "S1,R")])
    assert {layout(pinned, f"layers.{index}.down.weight") for index in range(3)} == {"S1,R"}


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"nothing.*": "R,R"}, "matches no parameter"),
        ({"layers.0.up.weight": "P,R"}, "cannot have the layout"),
        ({"layers.0.up/addmm#0": "R,S7"}, "cannot have the layout"),
    ],
)
def test_a_pin_that_cannot_be_met_says_why(pins: dict[str, str], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        plan(constraints=pins)


def test_two_pins_that_disagree_are_refused() -> None:
    with pytest.raises(ConstraintError, match="disagree"):
        plan(constraints={"layers.0.*.weight": "R,S0", "layers.0.up.weight": "R,R"})


def test_explain_tells_what_was_chosen_and_where_it_comes_from() -> None:
    text = plan(search="megatron").explain("layers.*.up.weight")
    assert "layers.[0-2].up.weight: is laid out R,S0" in text
    assert "nothing in the plan matches" in plan(search="ddp").explain("no.such")


def test_diff_names_the_folded_decisions_that_differ() -> None:
    text = plan(search="ddp").diff(plan(search="fsdp"))
    assert "layers.[0-2].up.weight: -> R,R  =>  -> S0,S0" in text
    assert "the decisions are the same" in plan(search="ddp").diff(plan(search="ddp"))


def test_optimizer_state_is_counted_when_an_optimizer_is_named() -> None:
    bare, adam = plan(search="ddp"), plan(search="ddp", optimizer=torch.optim.AdamW)
    assert adam.memory["optimizer_state"] == 2 * bare.memory["parameter"]
    assert "no optimizer= was named" in str(bare)
    assert adam.optimizer == "AdamW"


def test_the_search_problem_can_be_exported_and_solved_alone(tmp_path: Path) -> None:
    made = plan()
    made.export_problem(tmp_path / "problem.json.gz")
    problem = autopar.search.Problem.load(tmp_path / "problem.json.gz")
    assert autopar.search.solve(problem, time_limit_s=20).cost == pytest.approx(made.cost)


def test_planning_is_deterministic() -> None:
    assert plan().hash == plan().hash


def test_the_frontier_trades_memory_for_time_and_ends_where_nothing_fits() -> None:
    frontier = plan(optimizer=torch.optim.AdamW).frontier
    assert len(frontier) > 2
    assert [bytes_ for bytes_, _ in frontier] == sorted((bytes_ for bytes_, _ in frontier), reverse=True)
    assert [seconds for _, seconds in frontier] == sorted(seconds for _, seconds in frontier)


def test_a_loaded_plan_has_no_frontier_and_says_why(tmp_path: Path) -> None:
    plan(search="ddp").save(tmp_path / "p.json")
    with pytest.raises(PlanError, match="loaded, not searched"):
        _ = autopar.Plan.load(tmp_path / "p.json").frontier
