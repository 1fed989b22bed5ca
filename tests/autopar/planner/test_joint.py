"""Layouts and recomputation in one problem: no worse than layouts alone, and the same where there is room."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.capture.trace import capture
from autopar.errors import InfeasibleProblemError
from autopar.mesh import Mesh
from autopar.planner import joint as joint_module
from autopar.planner.build import PlanningProblem, build_problem
from autopar.planner.decisions import NO_OPTIMIZER, DecisionList
from autopar.planner.joint import Joint, joint_problem
from autopar.planner.packed_values import Packing
from autopar.planner.prices import Prices
from autopar.planner.saved_values import Packed
from autopar.search import peak_usage, solve


def planning_of(model: nn.Module, x: torch.Tensor) -> PlanningProblem:
    program, prices = capture(model, (x,), {}), Prices(Mesh((2,), hardware="cpu"))
    return build_problem(program, DecisionList(program, prices, NO_OPTIMIZER).build(), prices, usage_limit=None)


@pytest.fixture(scope="module")
def planning() -> PlanningProblem:
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Tanh())]
    return planning_of(nn.Sequential(*layers), torch.randn(256, 16))


def packing_of(planning: PlanningProblem, *words: str, hardware: str = "cpu") -> Packing:
    return Packing(planning.decisions, Prices(Mesh((2,), hardware=hardware)), words)


def joint_of(planning: PlanningProblem, limit: float, *words: str) -> Joint:
    joint = joint_problem(planning, {}, packing_of(planning, *words), limit)
    assert joint is not None
    return joint


def test_with_room_for_everything_nothing_is_recomputed(planning: PlanningProblem) -> None:
    joint = joint_of(planning, 1e15)
    found, layouts = solve(joint.problem), solve(planning.problem)
    assert found.cost == pytest.approx(layouts.cost, rel=1e-12)
    picks = found.choice[: len(planning.decisions)]
    states = [states[pick % len(states)] for pick, states in zip(picks, joint.states, strict=True)]
    assert not any(isinstance(state, int) for state in states)


def test_under_a_limit_it_is_never_worse_than_layouts_alone(planning: PlanningProblem) -> None:
    peak = peak_usage(planning.problem, solve(planning.problem).choice)
    gained = 0
    for fraction in (0.9, 0.75, 0.6):
        found = solve(joint_of(planning, fraction * peak).problem, time_limit_s=10)
        try:
            alone = solve(replace(planning.problem, usage_limit=fraction * peak), time_limit_s=10).cost
        except InfeasibleProblemError:
            alone = float("inf")
        assert found.cost <= alone * (1 + 1e-9)
        gained += found.cost < 0.999 * alone
    assert gained


def test_pins_hold_in_the_joint_problem(planning: PlanningProblem) -> None:
    gelu = next(index for index, item in enumerate(planning.decisions) if "addmm" in item.key and item.kind == "op")
    for pin, kind in (("recompute", int), ("offload", Packed)):
        joint = joint_problem(planning, {gelu: pin}, packing_of(planning), 1e15)
        assert joint is not None and all(isinstance(state, kind) for state in joint.states[gelu])


def test_with_loss_allowed_it_is_never_worse_than_without(planning: PlanningProblem) -> None:
    peak = peak_usage(planning.problem, solve(planning.problem).choice)
    costs = []
    for words in ((), ("compress-bf16",)):
        joint = joint_of(planning, 0.75 * peak, *words)
        found = solve(joint.problem, time_limit_s=10)
        costs.append(found.cost)
        picked = [states[pick % len(states)] for pick, states in zip(found.choice, joint.states, strict=False)]
        assert any(isinstance(state, Packed) for state in picked) == bool(words)
    assert costs[1] < costs[0]


def test_more_layers_of_one_kind_make_the_joint_problem_no_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_module, "MAX_PAIRS", 30_000)
    found = []
    for count in (3, 30):
        layers = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(count)]
        problem = joint_of(planning_of(nn.Sequential(*layers), torch.randn(256, 16)), 1e15).problem
        found.append((len(set(problem.groups or ())), len({id(costs) for costs in problem.costs})))
    assert found[0] == found[1]
