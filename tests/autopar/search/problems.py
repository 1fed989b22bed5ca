"""Small random problems for property tests, and the search that needs no cleverness."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from hypothesis import strategies as st

from autopar.search import FORBIDDEN, Problem, evaluate, make_problem

HUGE = FORBIDDEN - 1  # the greatest allowed cost


def every_choice(problem: Problem) -> Iterator[tuple[int, ...]]:
    """All combinations of strategies."""
    return itertools.product(*(range(len(costs)) for costs in problem.costs))


def least_cost(problem: Problem) -> float:
    """The optimum by enumeration; inf where nothing is feasible."""
    return min((evaluate(problem, choice) for choice in every_choice(problem)), default=math.inf)


@st.composite
def problems(draw: st.DrawFn, max_nodes: int = 5, classes: int = 0) -> Problem:
    """With and without limits, forbidden cells, parallel edges, empty intervals, whole and fractional costs.

    The nodes fall into up to `classes` classes; 0: no classes.
    """
    count = draw(st.integers(1, max_nodes))
    sizes = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    groups = None
    if classes:
        groups = draw(st.lists(st.integers(0, classes - 1), min_size=count, max_size=count))
        sizes = [sizes[groups.index(group)] for group in groups]
    cost = draw(
        st.sampled_from(
            [
                st.one_of(st.integers(0, 20), st.just(FORBIDDEN)),
                st.integers(0, 5),
                st.floats(0, 1e-3, allow_nan=False),
                st.one_of(st.integers(0, 100), st.integers(10**14, 10**15), st.just(FORBIDDEN)),
            ]
        )
    )
    times = st.tuples(st.integers(0, 6), st.integers(0, 6))
    edges = []
    if count > 1:
        pair = st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True)
        edges = [(first, second) for first, second in draw(st.lists(pair, max_size=2 * count))]
    return make_problem(
        [draw(st.lists(cost, min_size=size, max_size=size)) for size in sizes],
        [draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)) for size in sizes],
        [(min(pair), max(pair)) for pair in draw(st.lists(times, min_size=count, max_size=count))],
        edges,
        [draw(st.lists(cost, min_size=sizes[a] * sizes[b], max_size=sizes[a] * sizes[b])) for a, b in edges],
        usage_limit=draw(st.one_of(st.none(), st.integers(4, 25))),
        groups=groups,
    )
