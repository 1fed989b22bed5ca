"""Stages whose microbatches in flight exceed the memory recompute of every one; what fits stays as it was planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.plan import Plan
from autopar.planner.make import Planner

LAYERS, WIDTH, BATCH = 12, 32, 512


class Regression(nn.Module):
    """Layers of two ops each; with `also`, their last value is given beside the loss."""

    def __init__(self, also: tuple[str, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.also = also

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return {"loss": (x - target).abs().mean(), **dict.fromkeys(self.also, x)}


def planned(model: nn.Module, limit: int | None = None, **keywords: Any) -> Plan:
    mesh = autopar.Mesh((2, 2), ("pp", "dp"), hardware="h100")
    return autopar.make_plan(
        model, mesh, example_inputs=(torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)), microbatches=8,
        optimizer=torch.optim.AdamW, memory_limit_bytes=limit, **keywords,
    )  # fmt: skip


def recomputed(plan: Plan) -> list[int]:
    """Per stage, how many values are recomputed."""
    return [sum(entry.residency == "recompute" for entry in stage.plan.entries) for stage in plan.stages]


def layouts(plan: Plan) -> list[list[object]]:
    return [[entry.outputs for entry in stage.plan.entries if entry.kind == "parameter"] for stage in plan.stages]


def test_what_is_held_too_much_is_recomputed_of_every_microbatch_and_the_rest_stays() -> None:
    free = planned(Regression(), schedule="1f1b")
    first, last = (stage.in_flight for stage in free.stages)
    assert first > last  # so that the first rank alone is too full
    limit = free.peak_bytes - (free.stages[0].activation_bytes // 4)
    tight = planned(Regression(), limit, schedule="1f1b")
    assert tight.peak_bytes <= limit
    assert [stage.starts for stage in tight.stages] == [stage.starts for stage in free.stages]
    assert recomputed(free) == [0, 0]
    assert recomputed(tight)[0] > 0 and recomputed(tight)[1] == 0
    assert layouts(tight) == layouts(free)
    assert tight.stages[0].activation_bytes < free.stages[0].activation_bytes


def test_a_stage_that_fits_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = planned(Regression(), schedule="gpipe").peak_bytes
    runs: list[str] = []
    run = Planner.run
    monkeypatch.setattr(Planner, "run", lambda self: runs.append("") or run(self))
    planned(Regression(), int(0.85 * limit), schedule="gpipe")
    assert len(runs) == 2  # one for each stage: again, less is recomputed, nothing is searched


def test_outputs_that_nobody_is_given_hold_nothing() -> None:
    alone, beside = (planned(Regression(also), schedule="gpipe") for also in ((), ("last",)))
    assert beside.peak_bytes - alone.peak_bytes < BATCH * WIDTH  # bytes; the output of a rank has four times as many
