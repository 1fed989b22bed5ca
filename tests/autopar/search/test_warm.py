"""Solving again from a solution of before: as good as from scratch, and infeasible where that is."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleProblemError
from autopar.search import FORBIDDEN, Problem, Solution, evaluate, make_problem, solve, solve_again, warm
from autopar.search.warm import neighbours


@st.composite
def chains(draw: st.DrawFn) -> Problem:
    """Chains of nodes with some shortcuts, a few of them in classes."""
    count, numbers = draw(st.integers(2, 9)), st.integers(0, 50)
    costs = [draw(st.lists(numbers, min_size=3, max_size=3)) for _ in range(count)]
    edges = [(node, node + 1) for node in range(count - 1)]
    edges += [(node, node + 2) for node in range(count - 2) if draw(st.booleans())]
    matrices = [draw(st.lists(numbers, min_size=9, max_size=9)) for _ in edges]
    usages = [draw(st.lists(numbers, min_size=3, max_size=3)) for _ in range(count)]
    intervals = [(node, node + 2) for node in range(count)]
    return make_problem(costs, usages, intervals, edges, matrices, groups=[node // 2 for node in range(count)])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problem=chains(), data=st.data())
def test_a_pinned_problem_solved_again_costs_what_it_costs_from_scratch(problem: Problem, data: st.DataObject) -> None:
    before = solve(problem, time_limit_s=5).choice
    node, pick = data.draw(st.integers(0, len(before) - 1)), data.draw(st.integers(0, 2))
    costs = list(problem.costs)
    costs[node] = np.where(np.arange(3) == pick, costs[node], float(FORBIDDEN))
    limit = data.draw(st.sampled_from([None, 120.0]))
    pinned = replace(problem, costs=tuple(costs), usage_limit=limit)
    try:
        expected = solve(pinned, time_limit_s=5)
    except InfeasibleProblemError:
        with pytest.raises(InfeasibleProblemError):
            solve_again(pinned, before, (node,))
        return
    again = solve_again(pinned, before, (node,))
    assert again.cost == expected.cost == evaluate(pinned, again.choice)
    assert again.choice[node] == pick


def test_looking_around_the_change_leaves_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem([[0.0, 1.0]], [[0.0, 0.0]], [(0, 1)], [], [])
    limits: list[float] = []

    def slow(problem: Problem, time_limit_s: float, seed: int, **options: object) -> Solution:
        limits.append(time_limit_s)
        time.sleep(time_limit_s)
        raise InfeasibleProblemError("nothing in time")

    monkeypatch.setattr(warm, "solve_by_ilp", slow)
    with pytest.raises(InfeasibleProblemError):
        solve_again(problem, (0,), (0,), time_limit_s=0.4)
    near, wider, _ = limits
    assert near + wider <= 0.2
    assert sum(limits) <= 0.4


def test_neighbours_are_within_the_radius_and_classes_count_as_one() -> None:
    costs, edges = [[0.0]] * 6, [(node, node + 1) for node in range(5)]
    problem = make_problem(costs, costs, [(0, 1)] * 6, edges, [[0.0]] * 5)
    assert neighbours(problem, [0], 2) == {0, 1, 2}
    assert neighbours(replace(problem, groups=(0, 1, 2, 3, 4, 0)), [0], 1) == {0, 1, 4, 5}
