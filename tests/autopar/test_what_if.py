"""What-if: the plan under other circumstances, and how it differs; refused pins say why."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import cli
from autopar.errors import ConstraintError, MemoryLimitError, PlanError, UnsupportedOptionError
from autopar.search import solve
from autopar.sharding.layout import format_layout

MESH = autopar.Mesh((2, 2), ("dp", "tp"), hardware="h100")


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 256)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.pow(2).mean()


def deep() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Deep(), torch.ones(1024, 256)


@cache
def plan() -> autopar.Plan:
    model, batch = deep()
    return autopar.make_plan(model, MESH, example_inputs=batch, optimizer=torch.optim.AdamW)


def layout(of: autopar.Plan, key: str) -> str:
    return next(format_layout(entry.outputs[0]) for entry in of.entries if entry.key == key)


def fresh(**options: Any) -> autopar.Plan:
    model, batch = deep()
    options = {"optimizer": torch.optim.AdamW} | options
    return autopar.make_plan(model, options.pop("mesh", MESH), example_inputs=options.pop("batch", batch), **options)


def other_layout() -> str:
    """One that the plan does not have."""
    return next(text for text in ("R,S0", "R,R") if text != layout(plan(), "layers.1.0.weight"))


def test_a_pin_is_met_and_the_cost_is_that_of_a_fresh_plan() -> None:
    pin = {"layers.1.0.weight": other_layout()}
    changed = plan().what_if(pin=pin)
    assert layout(changed, "layers.1.0.weight") == other_layout()
    problem = fresh(constraints=pin).problem
    assert problem is not None
    expected = solve(replace(problem, usage_limit=None), time_limit_s=20).cost
    assert changed.cost - changed.residency_s == pytest.approx(expected, rel=1e-9)
    assert "foreseen" in changed.notes[0]


def test_what_is_foreseen_is_close_to_what_the_emitted_program_takes() -> None:
    changed = plan().what_if(pin={"layers.*.0.weight": other_layout()})
    emitted = changed.emitted()
    assert emitted.hash == changed.hash
    assert emitted.details is not None and changed.details is None
    assert changed.step_s == pytest.approx(emitted.step_s, rel=0.1)
    assert changed.peak_bytes == pytest.approx(emitted.peak_bytes, rel=0.35)
    assert emitted.emitted() is emitted


def test_a_changed_plan_can_be_asked_again() -> None:
    once = plan().what_if(pin={"layers.0.0.weight": "R,S0"})
    twice = once.what_if(pin={"layers.1.0.weight": "S0,R"})
    assert layout(twice, "layers.0.0.weight") == "R,S0" and layout(twice, "layers.1.0.weight") == "S0,R"
    assert twice.cost - twice.residency_s >= once.cost - once.residency_s - 1e-12


def test_a_changed_plan_computes_what_the_model_computes() -> None:
    model, batch = deep()
    changed = plan().what_if(pin={"layers.*.1.weight": "S1,R"})
    assert autopar.verify(model, MESH, example_inputs=batch, plan=changed).ok


@pytest.mark.parametrize(
    ("pin", "message", "fix"),
    [
        ({"layers.0.0.weight": "P,R"}, "cannot have the layout", "its rules and its shape"),
        ({"no.such": "R,R"}, "matches no parameter", "names of model.named_parameters"),
        ({"layers.0.0.weight": "R"}, "layers.0.0.weight", ""),
    ],
)
def test_a_pin_that_no_rule_allows_is_refused_with_the_reason(pin: dict[str, str], message: str, fix: str) -> None:
    with pytest.raises(ConstraintError, match=message) as caught:
        plan().what_if(pin=pin)
    assert fix in caught.value.fix


def test_less_memory_gives_a_plan_that_fits_or_says_by_how_much_it_does_not() -> None:
    limit = int(0.8 * plan().peak_bytes)
    changed = plan().what_if(memory_limit_bytes=limit)
    assert changed.peak_bytes <= limit and changed.memory_limit_bytes == limit and changed.step_ops is not None
    with pytest.raises(MemoryLimitError):
        plan().what_if(memory_limit_bytes=1000)


def test_other_hardware_meshes_and_batches_give_the_plans_that_fresh_ones_are() -> None:
    cases: list[tuple[dict[str, Any], autopar.Plan]] = [
        ({"hardware": "l4"}, fresh(hardware="l4")),
        ({"mesh": (4,)}, fresh(mesh=autopar.Mesh((4,), hardware="h100"))),
        ({"batch": 64}, fresh(batch=torch.ones(64, 256))),
    ]
    for change, expected in cases:
        changed = plan().what_if(**change)
        assert changed.step_s <= 1.02 * expected.step_s, change  # plans of equal cost may be simulated apart
        assert (changed.hardware, changed.mesh_shape, changed.model_hash) == (
            expected.hardware, expected.mesh_shape, expected.model_hash
        )  # fmt: skip


def test_a_plan_is_copied_and_sent_without_its_model() -> None:
    sent = pickle.loads(pickle.dumps(plan()))
    assert sent == plan() and sent.planning is None


def test_a_loaded_plan_says_what_it_needs(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="needs the model"):
        autopar.Plan.load(tmp_path / "plan.json").what_if(pin={"layers.0.0.weight": "R,R"})


def test_the_difference_tells_time_collectives_and_memory_folded() -> None:
    text = fresh(search="ddp").diff(fresh(search="fsdp"))
    head, *rest = text.splitlines()
    assert head.startswith("step ") and "%" in head and "peak " in head
    assert any(line.startswith("  all_gather over dp: 0 of 0 B") for line in rest)
    assert any(line.startswith("  at the peak: ") and "optimizer state" in line for line in rest)
    assert any(line.startswith("  layers.[0-2].0.weight: -> R,R  =>  -> S0,S0") for line in rest)
    assert "the decisions are the same" in plan().diff(plan())


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A saved plan, and its model to be named in a shell."""
    (tmp_path / "what_if_models.py").write_text("from tests.autopar.test_what_if import deep\n")
    monkeypatch.chdir(tmp_path)
    plan().save("plan.json")
    return "what_if_models:deep"


def test_the_commands_on_a_saved_plan(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "plan.json", "layers.1.0.weight"]) == 0
    assert "they need the model" in capsys.readouterr().out
    assert cli.main(["explain", "plan.json", "layers.1.0.weight", "--model", saved, "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["decisions"]
    assert told["alternatives"] and told["formulas"]
    assert cli.main(["explain", "plan.json", "nothing"]) == cli.CHECK_FAILED
    pin = f"layers.1.0.weight={other_layout()}"
    assert cli.main(["what-if", "plan.json", "--model", saved, "--pin", pin, "-o", "other.json"]) == 0
    assert layout(autopar.Plan.load("other.json"), "layers.1.0.weight") == other_layout()
    assert cli.main(["diff", "plan.json", "other.json"]) == 0
    assert "0.weight: -> " in capsys.readouterr().out
    assert cli.main(["what-if", "plan.json", "--model", saved]) == cli.BAD_USAGE
    assert cli.main(["report", "plan.json", "-o", "report.html"]) == 0
    assert Path("report.html").read_text().startswith("<!DOCTYPE html>")


def test_a_plan_is_printed_with_its_memory_and_drawn(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", saved, "--mesh", "2x2", "--search", "megatron", "--memory"]) == 0
    text = capsys.readouterr().out
    assert "peak " in text and "largest tensors alive then:" in text and "test_what_if.py" in text
    for name in ("memory.png", "memory.svg"):
        plan().plot("memory", name)
        assert Path(name).stat().st_size > 5000
    with pytest.raises(PlanError, match="no picture of"):
        plan().plot("nothing")


def test_memory_over_time_adds_up_to_the_peak_and_names_who_is_alive() -> None:
    assert plan().details is not None
    timeline = plan().details.timeline
    assert timeline is not None
    assert max(timeline.totals) == plan().peak_bytes == timeline.totals[timeline.index.index(timeline.peak_index)]
    at = timeline.index.index(timeline.peak_index)
    for kind, bytes_ in plan().memory.items():
        assert timeline.bytes_by_kind[kind][at] == bytes_
        assert sum(tensor.bytes for tensor in timeline.alive if tensor.kind == kind) == bytes_
    assert any("test_what_if.py" in tensor.where for tensor in timeline.alive)


@pytest.mark.parametrize(
    ("limit", "error"), [(0, MemoryLimitError), (-3, MemoryLimitError), ("4GB", UnsupportedOptionError)]
)
def test_a_memory_limit_that_is_none_is_told(limit: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="bytes"):
        plan().what_if(memory_limit_bytes=limit)


def test_a_plan_is_compared_with_a_plan_alone() -> None:
    with pytest.raises(PlanError, match="with a NoneType"):
        plan().diff(None)  # type: ignore[arg-type]  # wrong on purpose


class Odd(nn.Module):
    """Names with brackets and spaces."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({f"blk-{number} x": nn.ModuleDict({"a[0]": nn.Linear(8, 8)}) for number in range(3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = part["a[0]"](x)
        return x.sum()


def test_names_of_odd_characters_are_asked_pinned_and_saved(tmp_path: Path) -> None:
    made = autopar.make_plan(Odd(), MESH, example_inputs=torch.ones(8, 8))
    name = "parts.blk-1 x.a[0].weight"
    assert made.matching(name) and len(made.matching("parts.blk-1 x.a[0]")) > 1
    assert made.what_if(pin={name: "S0,R"}).matching(name)[0].outputs != made.matching(name)[0].outputs
    made.save(tmp_path / "odd.json")
    loaded = autopar.Plan.load(tmp_path / "odd.json")
    assert loaded.matching(name)[0].outputs == made.matching(name)[0].outputs and loaded.hash == made.hash
    assert "near it: " in made.explain("parts.blk-1 x.a[0].wight")
    assert len(plan().matching("layers.[0-2].0.weight")) == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["what-if", "plan.json", "--model", "m:f", "--memory-limit", "0"], "no plan fits 0.0 bytes"),
        (["what-if", "plan.json", "--model", "m:f", "--memory-limit", "inf"], "no plan fits inf bytes"),
        (["what-if", "plan.json", "--model", "m:f", "--memory-limit", "few"], "'few' is not a number of bytes"),
        (["what-if", "plan.json", "--model", "m:f"], "nothing is changed"),
        (["plan", "m:f", "--mesh", "2", "--memory-limit", "nan"], "no plan fits nan bytes"),
        (["plan", "m:f", "--mesh", "2", "--stages", "x"], "--stages 'x' is neither a number nor auto"),
        (["plan", "m:f", "--mesh", "2", "--stages", "-1"], "--stages '-1' is neither a number nor auto"),
    ],
)
def test_a_number_in_a_shell_is_refused_by_what_it_says(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert cli.main(words) == cli.BAD_USAGE
    assert said in capsys.readouterr().err
