"""Solving again after a small change: first around it, the rest as it was; then everything, from there."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from autopar.errors import InfeasibleProblemError
from autopar.search.evaluation import evaluate
from autopar.search.ilp import solve_by_ilp
from autopar.search.presolve import DOMINANCE_CELLS
from autopar.search.problem import FORBIDDEN, Problem
from autopar.search.registry import solve
from autopar.search.solution import Solution

RADIUS = 4  # edges around what changed: in a transformer, the ops of the sub-layer
WIDER = 10  # where nothing within RADIUS is feasible


def solve_again(
    problem: Problem,
    before: Sequence[int],
    changed: Iterable[int],
    *,
    time_limit_s: float = 10.0,
    seed: int = 0,
    gap: float = 0.0,
) -> Solution:
    """The solution of a problem of which `before` was one until the nodes `changed` were.

    As exact as `solve`: what is found around the change is where the `ilp` strategy starts, and since that is close to
    the optimum, its bounds drop at once what dominance tests would drop at length. Looking around the change takes no
    more than half of the time. Raises `InfeasibleProblemError`.
    """
    started = time.monotonic()
    start = solve_around(problem, before, changed, time_limit_s=0.5 * time_limit_s, seed=seed)
    strategy = partial(solve_by_ilp, dominance_cells=DOMINANCE_CELLS if start is None else 0)
    left = max(0.0, time_limit_s - (time.monotonic() - started))
    return solve(problem, strategy=strategy, time_limit_s=left, seed=seed, start=start, gap=gap)


def solve_around(
    problem: Problem, before: Sequence[int], changed: Iterable[int], *, time_limit_s: float, seed: int
) -> tuple[int, ...] | None:
    """The best choice that differs from `before` only within a few edges of `changed`; None where none is feasible."""
    seeds = tuple(changed)
    deadline = time.monotonic() + time_limit_s
    for radius in (RADIUS, WIDER):
        near = neighbours(problem, seeds, radius)
        costs = list(problem.costs)
        for node, pick in enumerate(before):
            if node not in near:
                costs[node] = np.where(np.arange(len(costs[node])) == pick, costs[node], float(FORBIDDEN))
        try:
            solution = solve_by_ilp(replace(problem, costs=tuple(costs)), max(0.0, deadline - time.monotonic()), seed)
        except InfeasibleProblemError:
            continue
        if math.isfinite(evaluate(problem, solution.choice)):
            return solution.choice
    return None


def neighbours(problem: Problem, seeds: Iterable[int], radius: int) -> set[int]:
    """The nodes within `radius` edges of `seeds`; nodes of one class count as one."""
    linked: dict[int, list[int]] = defaultdict(list)
    for first, second in problem.edges:
        linked[first].append(second)
        linked[second].append(first)
    groups = problem.groups or tuple(range(len(problem.costs)))
    members: dict[int, list[int]] = defaultdict(list)
    for node, group in enumerate(groups):
        members[group].append(node)
    found: set[int] = set()
    waiting: deque[tuple[int, int]] = deque((seed, 0) for seed in seeds)
    while waiting:
        node, distance = waiting.popleft()
        if node in found:
            continue
        for same in members[groups[node]]:
            found.add(same)
            if distance < radius:
                waiting.extend((other, distance + 1) for other in linked[same] if other not in found)
    return found
