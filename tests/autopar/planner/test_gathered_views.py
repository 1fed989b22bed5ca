"""Values that the forward gathers for a view which the backward reads: the copy is kept, or gathered again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.capture.trace import capture
from autopar.mesh import Mesh
from autopar.planner.joint import joint_problem
from autopar.planner.make import Options, Planner, plan_program
from autopar.planner.optimizers import optimizer_of
from autopar.planner.recomputation import with_gathers
from autopar.planner.residency import USUAL
from autopar.planner.saved_values import is_view
from autopar.search import solve
from autopar.sharding.layout import replicated, shard_dim


class Blocks(nn.Module):
    """Linears on inputs of three dims, which they view as two."""

    def __init__(self, width: int = 64, count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def planner_of(memory_limit_bytes: int | None = None, time_limit_s: float = 30.0, ranks: int = 4) -> Planner:
    program = capture(Blocks(), (torch.randn(16, 128, 64),), {})
    options = Options(
        optimizer=optimizer_of(torch.optim.AdamW), memory_limit_bytes=memory_limit_bytes, time_limit_s=time_limit_s
    )
    return Planner(program, Mesh((ranks,), hardware="h100"), options)


def free_peak_bytes(planner: Planner) -> int:
    """What the fastest layouts need, all of it kept."""
    free = planner._solve(None)
    assert free is not None
    return free.peak_bytes


def gathering(planner: Planner) -> tuple[int, ...]:
    """The best choice in which what the backward reads through a view is cut where it is made, and viewed whole."""
    planning, allowed = planner.planning, {}
    whole = replicated(1)
    for index, decision in enumerate(planning.decisions):
        source = planning.decisions[decision.sources[0].decision] if decision.sources else None
        if decision.phase != "forward" or not is_view(decision) or source is None or "add.Tensor" not in source.key:
            continue
        made = [shard_dim(strategy.outputs[0][0]) is not None for strategy in source.strategies]
        allowed[decision.sources[0].decision] = np.array(made)
        allowed[index] = np.array([strategy.inputs[0] == whole for strategy in decision.strategies])
    assert allowed
    return solve(planning.restricted(allowed), time_limit_s=10).choice


def test_a_copy_below_a_view_is_gathered_again_for_memory() -> None:
    planner = planner_of()
    choice = gathering(planner)
    candidate = planner.add("gathering", choice, planner.as_solution("gathering", choice))
    fit = planner._fit(candidate)
    found = {key: gather for key, gather in fit.moves.gathers.items() if gather.root != key and gather.views}
    found = {key: it for key, it in found.items() if planner.planning.decisions[it.root].kind == "op"}
    assert found
    kept, again = (
        fit.measured(with_gathers(USUAL, fit.moves.gathers, set(fit.moves.gathers) - dropped))
        for dropped in (set(), found.keys())
    )
    saved = kept.measured.memory["saved"] - again.measured.memory["saved"]
    assert saved >= 0.5 * sum(gather.bytes for gather in found.values())
    assert again.seconds > kept.seconds


def test_what_the_joint_problem_holds_is_near_what_is_emitted() -> None:
    planner = planner_of()
    limit = 0.5 * free_peak_bytes(planner)
    joint = joint_problem(planner.planning, {}, planner.packing, limit)
    assert joint is not None
    picks = solve(joint.problem, time_limit_s=10).choice
    choice = joint.choice(picks)
    candidate = planner.add("joint", choice, planner.as_solution("joint", choice))
    assert planner._with(candidate, joint.residency(picks)).peak_bytes <= 1.3 * limit


@pytest.mark.parametrize("time_limit_s", [0.0, 30.0])
def test_a_limit_that_fsdp_meets_by_recomputing_is_met_whatever_time_there_is(time_limit_s: float) -> None:
    planner = planner_of()
    choice = planner._hand_plan("fsdp")
    fit = planner._fit(planner.add("fsdp", choice, planner.as_solution("fsdp", choice)))
    limit = int(1.02 * fit.measured(fit.checkpointed).measured.peak_bytes)
    tight = planner_of(limit, time_limit_s)
    plan = plan_program(tight.program, tight.mesh, tight.options).plan
    assert plan.peak_bytes <= limit


def test_a_plan_that_views_a_gathered_copy_again_computes_the_model() -> None:
    peak = free_peak_bytes(planner_of())
    report = autopar.verify(
        Blocks(),
        Mesh((2, 2), hardware="h100"),
        example_inputs=(torch.randn(16, 128, 64),),
        memory_limit_bytes=int(0.6 * peak),
        optimizer=torch.optim.AdamW,
    )
    assert report.ok
    assert any("view" in entry.key and entry.residency == "recompute" for entry in report.plan.entries)
