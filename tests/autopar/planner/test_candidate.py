"""What is known of a plan before it is emitted: the least it holds, and a bound on its cost."""

from __future__ import annotations

import copy
import itertools
import random

import numpy as np
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
from tests.autopar.random_programs import random_choice


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
        # the rest, a third here, is what ops need while they are computed: no bound knows it before it is emitted
        assert 0.6 * candidate.peak_bytes <= candidate.least_bytes <= candidate.peak_bytes, candidate.name


def test_no_plan_costs_less_than_the_bound_whatever_copies_it_keeps(planner: Planner) -> None:
    bound = solve(with_copies_kept(planner.planning)).bound
    assert bound > 0
    for candidate in planner.candidates:
        gathers = planner._fit(candidate).moves.gathers
        for kept in itertools.chain([()], [tuple(gathers)]):
            residency = Residency(gathered_once=frozenset(index for index in kept if gathers[index].is_direct))
            seconds = planner._fit(candidate).seconds(residency)
            assert candidate.with_residency(residency, seconds).solution.cost >= bound * (1 - 1e-9), candidate.name


def test_no_plan_costs_less_than_the_bound_whatever_is_chosen_recomputed_and_kept(planner: Planner) -> None:
    own, chance = copy.copy(planner), random.Random(0)
    relaxed = solve(with_copies_kept(own.planning))
    choices = {relaxed.choice, *(item.choice for item in own.candidates)}
    choices |= {random_choice(own.planning, chance) for _ in range(10)}
    own.candidates, tried = [], 0
    for choice in sorted(choices):
        candidate = own.add("one of many", choice, own.as_solution("one of many", choice))
        fit = own._fit(candidate)
        direct = [index for index, gather in fit.moves.gathers.items() if gather.is_direct]
        for share in (0.0, 0.1, 0.5, 1.0):
            again = fit.saved.closed({index for index in fit.saved.values if chance.random() < share})
            once = frozenset(index for index in direct if chance.random() < 1 - share)
            residency = Residency(again, once)
            found = candidate.with_residency(residency, fit.seconds(residency))
            assert found.solution.cost >= relaxed.bound * (1 - 1e-9), (choice, residency)
            tried += np.isfinite(found.solution.cost)
    assert tried >= 4 * 5


def test_a_joint_search_whose_plans_stay_far_over_the_limit_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = planner_of(32)
    over = planner.limit * 3
    monkeypatch.setattr(planner, "_fitted", lambda candidate: (False, over))
    assert not planner._search_jointly()
