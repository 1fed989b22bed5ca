"""What the problems of the search hold and cost, beside what is emitted: large models are planned by these alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.capture.trace import capture
from autopar.mesh import Mesh
from autopar.planner.joint import joint_problem
from autopar.planner.make import Options, Planner
from autopar.planner.move_buffers import peak_with_moves
from autopar.planner.optimizers import optimizer_of
from autopar.planner.saved_values import SavedValues
from autopar.search import peak_usage, solve


class Stack(nn.Module):
    """Layers of two linears; `masked`: each reads one mask of the inputs, as attention does."""

    def __init__(self, width: int, count: int, *, masked: bool = False) -> None:
        super().__init__()
        self.masked = masked
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.sign().exp()
        for layer in self.layers:
            y = layer(x)
            x = x + (y * mask if self.masked else y * y)
        return x.square().mean()


def planner_of(model: nn.Module, x: torch.Tensor, shape: tuple[int, ...]) -> Planner:
    program = capture(model, (x,), {})
    return Planner(program, Mesh(shape, hardware="h100"), Options(optimizer=optimizer_of(torch.optim.AdamW)))


def test_a_gradient_is_held_as_a_partial_sum_only_until_it_is_reduced() -> None:
    """Else the sums of all layers count together, and a model of many parameters seems to fit nowhere."""
    planner = planner_of(Stack(128, 12), torch.randn(16, 128), (8,))
    choice = planner._hand_plan("fsdp")
    emitted = planner.add("fsdp", choice, planner.as_solution("fsdp", choice)).peak_bytes
    assert peak_usage(planner.planning.problem, choice) <= 1.1 * emitted


@pytest.mark.parametrize("masked", [False, True])
def test_what_every_layer_reads_leaves_each_its_own_time_to_be_recomputed(masked: bool) -> None:
    decisions = planner_of(Stack(64, 6, masked=masked), torch.randn(256, 64), (4,)).planning.decisions
    saved = SavedValues(decisions, 1)
    earlier = {value.starts[0] for value in saved.values.values() if len(value.starts) > 1}
    assert len(earlier - {saved.backward_start}) >= 4


@pytest.mark.parametrize(("width", "batch", "shape"), [(256, 2**14, (4, 2)), (512, 64, (8,))])
def test_the_joint_problem_costs_and_holds_what_its_answer_is_foreseen_to(
    width: int, batch: int, shape: tuple[int, ...]
) -> None:
    """Gathers that are repeated for the backward are hidden there as they were in the forward."""
    planner = planner_of(Stack(width, 8), torch.randn(batch, width), shape)
    fsdp = planner._hand_plan("fsdp")
    fit = planner._fit(planner.add("fsdp", fsdp, planner.as_solution("fsdp", fsdp)))
    on_device = replace(fit.checkpointed, hosted=frozenset())
    limit = 1.1 * fit.measured(on_device).measured.peak_bytes
    joint = joint_problem(planner.planning, {}, replace(planner.packing, hosted=None), limit)
    assert joint is not None
    found = solve(joint.problem, time_limit_s=10)
    choice = joint.choice(found.choice)
    own = planner.add("joint", choice, planner.as_solution("joint", choice))
    candidate = planner._with(own, joint.residency(found.choice))
    assert candidate.solution.cost == pytest.approx(found.cost, rel=0.01)
    foreseen = peak_with_moves(planner.planning, joint.problem, found.choice, choice)
    assert peak_usage(joint.problem, found.choice) <= foreseen <= 1.1 * candidate.peak_bytes
    assert candidate.peak_bytes <= 1.15 * foreseen
