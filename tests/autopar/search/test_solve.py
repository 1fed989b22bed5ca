"""The solver against enumeration, and its promises about bounds, seeds, starts and interrupts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from autopar.errors import InfeasibleProblemError, TooWideError, UnknownStrategyError
from autopar.search import FORBIDDEN, Problem, Solution, evaluate, make_problem, register, solve, strategy_names
from tests.autopar.search.problems import least_cost, problems

DATA = Path(__file__).parents[2] / "data" / "iopddl"


def solved(problem: Problem) -> float:
    try:
        solution = solve(problem, time_limit_s=20)
    except InfeasibleProblemError:
        return math.inf
    assert 0 <= solution.cost - solution.bound <= 1e-6 * abs(solution.cost) + 1e-12
    assert evaluate(problem, solution.choice) == solution.cost
    return solution.cost


@given(problem=problems())
@settings(max_examples=300)
def test_ilp_matches_brute_force(problem: Problem) -> None:
    assert solved(problem) == pytest.approx(least_cost(problem), rel=1e-9, abs=1e-12)


@given(problem=problems(classes=3))
@settings(max_examples=100)
def test_classes_choose_together_and_still_match_brute_force(problem: Problem) -> None:
    assert solved(problem) == pytest.approx(least_cost(problem), rel=1e-9, abs=1e-12)


@given(problem=problems(max_nodes=4))
@settings(max_examples=25)
def test_no_strategy_beats_the_optimum_or_reports_a_cost_that_evaluate_denies(problem: Problem) -> None:
    best = least_cost(problem)
    for name in strategy_names():
        if name == "researcher":
            continue
        try:
            solution = solve(problem, strategy=name, time_limit_s=0.02)
        except (InfeasibleProblemError, TooWideError):
            continue
        assert solution.cost == evaluate(problem, solution.choice)
        assert solution.cost >= best - 1e-9 * abs(best) if math.isfinite(best) else solution.cost == math.inf
        assert solution.bound <= best + 1e-9 * abs(best)


def test_forbidden_costs_add_up_without_overflow() -> None:
    problem = make_problem(
        [[FORBIDDEN, 1]] * 20,
        [[0, 0]] * 20,
        [(0, 0)] * 20,
        [(i, i + 1) for i in range(19)],
        [[FORBIDDEN] * 3 + [1]] * 19,
    )
    assert solve(problem).cost == 39
    assert evaluate(problem, [0] * 20) == math.inf


def test_the_contest_example_costs_445_and_without_its_limit_415() -> None:
    problem = Problem.load(DATA / "example.json")
    solution = solve(problem)
    assert (solution.cost, solution.bound, solution.choice) == (445, 445, (0, 0, 2, 1, 0))
    assert solve(replace(problem, usage_limit=None)).cost == 415


@pytest.mark.parametrize(("name", "optimum"), [("B", 532_843), ("G", 217_039)])
def test_contest_instances_are_proven_optimal(name: str, optimum: int) -> None:
    solution = solve(Problem.load(DATA / f"asplos-2025-iopddl-{name}.json.gz"), time_limit_s=120)
    assert (solution.cost, solution.bound) == (optimum, optimum)


def test_the_search_ends_where_only_rounding_is_left_to_prove() -> None:
    """Great costs that nobody pays make the quantum coarse next to the optimum; that must not use up the time."""
    random = np.random.default_rng(4)
    count = 12
    costs = np.hstack([random.uniform(0, 1e-6, (count, 2)), np.full((count, 1), 1e3)])
    pairs = [(a, (a + step) % count) for a in range(count) for step in (1, 2, 5)]
    problem = make_problem(
        costs.tolist(),
        random.integers(1, 9, (count, 3)).tolist(),
        [(0, 9)] * count,
        pairs,
        random.uniform(0, 1e-6, (len(pairs), 3, 3)).tolist(),
        usage_limit=48,
    )
    solution = solve(problem, time_limit_s=60)
    assert solution.gap > 1e-9
    assert solution.cost - solution.bound <= 1e-9
    assert solution.seconds < 30


def test_what_cannot_fit_names_the_interval_of_time() -> None:
    problem = make_problem([[1, 2], [3]], [[5, 6], [7]], [(0, 10), (4, 6)], [], [], usage_limit=11)
    with pytest.raises(InfeasibleProblemError, match=r"time \[4, 6\)"):
        solve(problem)


def test_what_cannot_fit_because_of_costly_pairs_names_the_interval_too() -> None:
    problem = make_problem(
        [[0, 0], [0, 0], [0, 0]],
        [[1, 9], [9, 1], [1, 9]],
        [(0, 20), (5, 8), (30, 31)],
        [(0, 1)],
        [[0, FORBIDDEN, FORBIDDEN, 0]],
        usage_limit=9,
    )
    with pytest.raises(InfeasibleProblemError, match=r"time \[5, 8\)"):
        solve(problem)


def test_forbidden_pairs_without_a_way_out_are_infeasible() -> None:
    problem = make_problem([[0], [0]], [[0], [0]], [(0, 0), (0, 0)], [(0, 1)], [[FORBIDDEN]])
    with pytest.raises(InfeasibleProblemError, match="forbidden"):
        solve(problem)


def test_one_seed_gives_one_choice() -> None:
    problem = Problem.load(DATA / "asplos-2025-iopddl-G.json.gz")
    first, second = (solve(problem, strategy="greedy", seed=3) for _ in range(2))
    assert first.choice == second.choice


def test_the_answer_is_never_worse_than_the_start() -> None:
    problem = Problem.load(DATA / "example.json")
    solution = solve(problem, strategy="random", start=(0, 0, 2, 1, 0), time_limit_s=0)
    assert solution.cost == 445


def test_an_interrupt_returns_the_incumbent() -> None:
    problem = Problem.load(DATA / "asplos-2025-iopddl-G.json.gz")

    def interrupt(seconds: float, cost: float, bound: float) -> None:
        if math.isfinite(cost):
            raise KeyboardInterrupt

    solution = solve(problem, observer=interrupt)
    assert math.isfinite(solution.cost)


def test_a_time_limit_of_nothing_still_answers() -> None:
    problem = Problem.load(DATA / "asplos-2025-iopddl-G.json.gz")
    for name in ("ilp", "local", "beam"):
        assert len(solve(problem, strategy=name, time_limit_s=0.0).choice) == len(problem.costs)


def test_a_registered_strategy_is_found_by_its_name() -> None:
    @register("researcher")
    def first_choice(problem: Problem, time_limit_s: float, seed: int) -> Solution:
        return Solution((0,) * len(problem.costs), 0.0)

    problem = Problem.load(DATA / "example.json")
    solution = solve(problem, strategy="researcher")
    assert solution.strategy == "researcher"
    assert solution.cost == evaluate(problem, (0, 0, 0, 0, 0))


def test_an_unknown_strategy_lists_the_known_ones() -> None:
    with pytest.raises(UnknownStrategyError, match="ilp, dp, greedy"):
        solve(Problem.load(DATA / "example.json"), strategy="magic")


@given(problem=problems(classes=3))
@settings(max_examples=100)
def test_arrays_that_nodes_and_edges_share_count_each_time(problem: Problem) -> None:
    same: dict[str, np.ndarray] = {}

    def shared(arrays: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        return tuple(same.setdefault(repr(array.tolist()), array) for array in arrays)

    together = replace(problem, costs=shared(problem.costs), edge_costs=shared(problem.edge_costs))
    assert solved(together) == pytest.approx(least_cost(problem), rel=1e-9, abs=1e-12)
