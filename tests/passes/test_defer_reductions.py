"""The last sums of gradients over the ranks are taken out of the backward, and made once for all microbatches."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import fx, nn

import autopar
from autopar.arguments import make_options
from autopar.capture.program import OutputKind
from autopar.capture.trace import capture
from autopar.passes.collectives import collective_kind, is_collective
from autopar.passes.defer_reductions import DeferredReductions, defer_reductions
from autopar.planner.make import Planned, plan_program


@cache
def planned(search: str) -> Planned:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    program = capture(model, (torch.ones(8, 8),), {}, device="cpu")
    mesh = autopar.Mesh((2,), ("dp",), hardware="cpu")
    return plan_program(program, mesh, make_options(search, None, None, (), None))


def deferred(search: str) -> DeferredReductions | None:
    local = planned(search).local
    assert local.backward is not None
    return defer_reductions(local.backward, local.program)


def sums(gm: fx.GraphModule) -> list[str]:
    return [collective_kind(node) for node in gm.graph.nodes if is_collective(node)]


def test_every_gradient_of_replicas_is_summed_after_the_last_microbatch() -> None:
    cut = deferred("ddp")
    assert cut is not None
    gradients = [output for output in planned("ddp").local.program.outputs if output.kind is OutputKind.GRADIENT]
    assert len(cut.numbers) == len(gradients) == 4
    assert sums(cut.of_microbatch) == [] and sums(cut.of_step) == ["all_reduce"] * 4


def test_gradients_that_are_scattered_stay_as_they_are() -> None:
    assert deferred("fsdp") is None


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_gradients_are_those_of_one_device(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())])
    mesh = autopar.Mesh((2, 2), ("pp", "dp"), hardware="cpu")
    report = autopar.verify(
        model, mesh, example_inputs=torch.randn(14, 8), search="ddp", stages=2, schedule=schedule, microbatches=7
    )
    assert report.ok, report.table
    assert report.plan is not None and report.peak_bytes <= report.plan.peak_bytes <= 1.1 * report.peak_bytes
