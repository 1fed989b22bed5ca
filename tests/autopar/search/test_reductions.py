"""Each reduction keeps the optimum and finds its way back; each bound stays below the optimum."""

from __future__ import annotations

import math
from itertools import chain, repeat
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings

from autopar.errors import InfeasibleProblemError
from autopar.search import FORBIDDEN, Problem, evaluate, make_problem, solve
from autopar.search.build import build_network, maximal_times
from autopar.search.capacity import RangeMinimum
from autopar.search.elimination import Elimination
from autopar.search.marginal import MarginalModel, equal_rows
from autopar.search.neighbourhood import Neighbourhoods
from autopar.search.presolve import Deadend, Overfull, presolve
from autopar.search.relaxation import Relaxation
from autopar.search.subnetwork import subnetwork
from tests.autopar.search.problems import every_choice, least_cost, problems

NOTHING = [(0, 0)] * 9  # empty intervals


def test_a_chain_without_usage_is_solved_by_reductions_alone() -> None:
    random = np.random.default_rng(0)
    edges = [(node, node + 1) for node in range(7)]
    problem = make_problem(
        random.integers(0, 9, (8, 3)).tolist(),
        [[0] * 3] * 8,
        NOTHING[:8],
        edges,
        random.integers(0, 9, (7, 3, 3)).tolist(),
    )
    built = build_network(problem)
    presolve(built.network)
    assert not built.network.nodes()
    choice = built.choice(built.network.recover({}))
    assert evaluate(problem, choice) == built.network.offset == least_cost(problem)


def test_a_neighbour_that_follows_is_folded_with_its_usage() -> None:
    only_equal = [[0, FORBIDDEN, FORBIDDEN], [FORBIDDEN, 0, FORBIDDEN], [FORBIDDEN, FORBIDDEN, 0]]
    problem = make_problem(
        [[0, 1, 2], [0, 0, 0], [0, 5]],
        [[0, 0, 0], [9, 5, 1], [3, 0]],
        [(0, 0), (0, 1), (0, 1)],
        [(0, 1)],
        [only_equal],
        usage_limit=9,
    )
    built = build_network(problem)
    presolve(built.network)
    leader, other = built.network.nodes()
    assert (leader in (0, 1), other) == (True, 2)
    assert built.network.loads[leader].amounts.tolist() == [[8.0, 4.0, 0.0]]
    assert built.network.capacity.tolist() == [8.0]  # one unit is used whatever is chosen


def test_a_cheaper_strategy_that_uses_more_does_not_dominate() -> None:
    problem = make_problem([[1, 2, 3], [0, 5]], [[9, 1, 2], [3, 0]], [(0, 1)] * 2, [], [], usage_limit=9)
    built = build_network(problem)
    presolve(built.network)
    assert built.network.labels[0].tolist() == [0, 1]
    assert built.network.beaten == {(0, 2): 1}


def test_a_strategy_that_fits_next_to_nobody_is_dropped() -> None:
    """The others use 3 at least, so 8 of 10 is too much, although it costs nothing; the optimum does not change."""
    problem = make_problem(
        [[0, 5, 9], [0, 1]], [[8, 6, 0], [5, 3]], [(0, 4), (2, 6)], [(0, 1)], [[[0, 0], [0, 0], [0, 3]]], usage_limit=10
    )
    built = build_network(problem)
    presolve(built.network, dominance_cells=0)
    assert 0 not in built.network.labels[0]
    assert solve(problem).cost == least_cost(problem)


def test_the_least_of_a_range_is_found_for_every_range() -> None:
    values = np.random.default_rng(3).integers(0, 50, 13)
    low, high = np.array([(a, b) for a in range(13) for b in range(a + 1, 14)]).T
    expected = [values[a:b].min() for a, b in zip(low, high, strict=True)]
    assert RangeMinimum(values).of(low, high).tolist() == expected


def test_a_limit_that_cannot_bind_leaves_no_usage() -> None:
    problem = make_problem([[1, 2], [1, 2]], [[5, 1], [4, 1]], [(0, 3), (1, 4)], [], [], usage_limit=9)
    network = build_network(problem).network
    assert not network.loads
    assert not len(network.times)


def test_usage_counts_only_where_the_live_set_is_maximal() -> None:
    assert maximal_times([(0, 4), (1, 3), (2, 6), (5, 9), (7, 7)]).tolist() == [2, 5]
    assert maximal_times([(3, 3)]).tolist() == []


def test_a_folded_class_counts_every_member() -> None:
    """Two nodes of one class and the edge between them become one node: costs add, the diagonal joins."""
    problem = make_problem(
        [[1, 2], [10, 20]],
        [[3, 0], [3, 0]],
        [(0, 2), (1, 3)],
        [(0, 1)],
        [[[100, 7], [7, 200]]],
        usage_limit=5,
        groups=[4, 4],
    )
    network = build_network(problem).network
    assert network.unary[0].tolist() == [111.0, 222.0]
    assert network.loads[0].amounts.tolist() == [[6.0, 0.0]]


@given(problem=problems(max_nodes=4))
@settings(max_examples=60)
def test_the_reduced_network_has_the_same_optimum(problem: Problem) -> None:
    try:
        built = build_network(problem)
        presolve(built.network)
    except (InfeasibleProblemError, Deadend, Overfull):
        assert least_cost(problem) == math.inf
        return
    network = built.network
    nodes = network.nodes()
    remaining = make_problem(
        [[0] * network.size(node) for node in nodes],
        [[0] * network.size(n) for n in nodes],
        [(0, 0)] * len(nodes),
        [],
        [],
    )
    costs = []
    for picks in every_choice(remaining):
        positions = dict(zip(nodes, picks, strict=True))
        choice = built.choice(network.recover(network.labelled(positions)))
        if not (network.usage_of(positions) > network.capacity).any():
            costs.append(evaluate(problem, choice))
    assert min(costs, default=math.inf) == pytest.approx(least_cost(problem), rel=1e-9, abs=1e-12)


@given(problem=problems(max_nodes=5))
@settings(max_examples=60)
def test_prices_and_messages_bound_the_optimum_and_drop_no_optimal_strategy(problem: Problem) -> None:
    best = least_cost(problem)
    try:
        network = build_network(problem).network
        presolve(network)
    except (InfeasibleProblemError, Deadend, Overfull):
        return
    if not network.nodes() or not math.isfinite(best):
        return
    search = Relaxation(network, np.zeros(len(network.capacity)), 0, math.inf).priced
    search.run(15)
    slack = 1e-9 * abs(best) + network.to_cost(network.rounding)
    assert network.to_cost(search.bound) <= best + slack
    for node, keep in search.survivors((best + slack) / network.quantum).items():
        assert keep.any(), node


@pytest.mark.parametrize("rounds", [0, 1, 2])
@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_loads_are_those_of_the_nodes_that_are_left_when_the_time_is_up(rounds: int, problem: Problem) -> None:
    clock = chain([0.0] * rounds, repeat(math.inf))  # the deadline comes after so many rounds of reductions
    try:
        network = build_network(problem).network
        with mock.patch("autopar.search.presolve.time.monotonic", lambda: next(clock)):
            presolve(network, deadline=1.0)
    except (InfeasibleProblemError, Deadend, Overfull):
        return
    assert all(network.alive[node] and len(load.labels) == network.size(node) for node, load in network.loads.items())
    MarginalModel(network).add_usage_rows(range(len(network.times)))


def test_elimination_is_exact_on_a_circle() -> None:
    random = np.random.default_rng(1)
    edges = [(node, (node + 1) % 5) for node in range(5)]
    problem = make_problem(
        random.integers(0, 9, (5, 3)).tolist(),
        [[0] * 3] * 5,
        NOTHING[:5],
        edges,
        random.integers(0, 9, (5, 3, 3)).tolist(),
    )
    network = build_network(problem).network
    elimination = Elimination.plan(network)
    assert elimination is not None
    value, positions = elimination.minimise()
    assert value == least_cost(problem) == network.cost_of(positions)
    assert Elimination.plan(network, max_cells=8) is None


def test_equal_rows_share_one_class() -> None:
    classes, representatives = equal_rows(np.array([[1, 2], [3, 4], [1, 2]]))
    assert classes.tolist() == [0, 1, 0]
    assert representatives.tolist() == [0, 1]


def test_a_choice_and_its_point_in_the_marginal_model_agree() -> None:
    problem = make_problem(
        [[1, 2], [3, 4]], [[5, 1], [5, 1]], [(0, 2), (1, 3)], [(0, 1)], [[[0, 7], [FORBIDDEN, 1]]], usage_limit=6
    )
    network = build_network(problem).network
    model = MarginalModel(network)
    model.add_usage_rows([0])
    linear = model.model()
    point = model.point({0: 0, 1: 1})
    sums = np.bincount(linear.rows, linear.values * point[linear.columns], len(linear.row_lower))
    assert (linear.row_lower <= sums).all()
    assert (sums <= linear.row_upper).all()
    assert linear.costs @ point + network.offset == evaluate(problem, (0, 1)) == 12


def test_a_neighbourhood_keeps_the_rest_and_its_capacity() -> None:
    problem = make_problem(
        [[1, 2], [3, 4], [5, 6]], [[5, 1]] * 3, [(0, 3)] * 3, [(0, 1)], [[[0, 7], [8, 1]]], usage_limit=11
    )
    network = build_network(problem).network
    small = subnetwork(network, [0, 2], {0: 1, 1: 0, 2: 1})
    assert small.unary[0].tolist() == [1.0, 10.0]
    assert small.capacity.tolist() == [4.0]  # 11, less the three units that all use, less four of the fixed node


def test_neighbourhoods_only_improve() -> None:
    random = np.random.default_rng(2)
    pairs = [(a, b) for a in range(18) for b in range(a + 1, min(18, a + 3))]
    problem = make_problem(
        random.integers(0, 50, (18, 3)).tolist(),
        random.integers(0, 9, (18, 3)).tolist(),
        [(node, node + 5) for node in range(18)],
        pairs,
        random.integers(0, 50, (len(pairs), 3, 3)).tolist(),
        usage_limit=22,
    )
    network = build_network(problem).network
    relaxation = Relaxation(network, np.zeros(len(network.capacity)), 0, math.inf)
    relaxation.round(math.inf)
    priced = relaxation.priced
    thrifty = {node: int(network.amounts(node).sum(axis=0).argmin()) for node in network.nodes()}
    assert not (network.usage_of(thrifty) > network.capacity).any()
    improved = Neighbourhoods(network, thrifty, seed=0, prices=priced.best_prices, regrets=priced.regrets())
    seen = [improved.cost]
    for _ in range(4):
        improved.step(math.inf)
        seen.append(improved.cost)
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < seen[0]
    assert not (network.usage_of(improved.positions) > network.capacity).any()
