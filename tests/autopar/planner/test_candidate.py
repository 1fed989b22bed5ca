"""What is known of a plan before it is emitted: the least it holds, and a bound on its cost."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from autopar.capture.trace import capture
from autopar.errors import InfeasibleProblemError, PlanError
from autopar.mesh import Mesh
from autopar.planner.bounds import with_copies_kept
from autopar.planner.hand_plans import HAND_PLANS
from autopar.planner.make import Options, Planner
from autopar.planner.optimizers import optimizer_of
from autopar.planner.residency import Residency
from autopar.search import solve


def planner_of(width: int = 64) -> Planner:
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width))]
    program = capture(nn.Sequential(*layers), (torch.randn(2048, width),), {})
    planner = Planner(program, Mesh((2, 2), hardware="cpu"), Options(optimizer=optimizer_of(torch.optim.AdamW)))
    for name in HAND_PLANS:
        try:
            choice = planner._hand_plan(name)
        except (PlanError, InfeasibleProblemError):
            continue
        planner.add(name, choice, planner.as_solution(name, choice))
    planner._solve(None)
    return planner


@pytest.fixture(scope="module")
def planner() -> Planner:
    return planner_of()


def test_the_least_bytes_are_a_tight_lower_bound_on_what_is_emitted(planner: Planner) -> None:
    assert len(planner.candidates) >= 4
    for candidate in planner.candidates:
        assert 0.5 * candidate.peak_bytes <= candidate.least_bytes <= candidate.peak_bytes, candidate.name


def test_no_plan_costs_less_than_the_bound_whatever_copies_it_keeps(planner: Planner) -> None:
    bound = solve(with_copies_kept(planner.planning)).bound
    assert bound > 0
    for candidate in planner.candidates:
        gathers = planner._fit(candidate).moves.gathers
        for kept in itertools.chain([()], [tuple(gathers)]):
            residency = Residency(gathered_once=frozenset(index for index in kept if gathers[index].is_direct))
            seconds = planner._fit(candidate).seconds(residency)
            assert candidate.with_residency(residency, seconds).solution.cost >= bound * (1 - 1e-9), candidate.name


def test_a_joint_search_whose_plans_stay_far_over_the_limit_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = planner_of(32)
    over = planner.limit * 3
    monkeypatch.setattr(planner, "_fitted", lambda candidate: (False, over))
    assert not planner._search_jointly()
