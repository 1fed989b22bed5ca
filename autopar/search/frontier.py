"""The frontier memory x cost of a problem: what each byte less costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from autopar.errors import InfeasibleProblemError
from autopar.search.evaluation import usage_profile
from autopar.search.problem import Problem
from autopar.search.registry import solve


def peak_usage(problem: Problem, choice: Sequence[int]) -> float:
    """The most usage alive at any time under a choice."""
    return max((float(usage) for _, usage in usage_profile(problem, choice)), default=0.0)


def memory_frontier(
    problem: Problem, *, points: int = 8, shrink: float = 0.85, time_limit_s: float = 10.0, seed: int = 0
) -> tuple[tuple[int, float], ...]:
    """(peak usage, cost) of the best choices found under ever tighter limits, the roomiest first.

    Each limit is `shrink` times the peak of the choice before it; it ends where nothing fits, or after `points`. No
    point is dominated by another.
    """
    found: list[tuple[int, float]] = []
    limit: float | None = None
    for _ in range(points):
        try:
            solution = solve(replace(problem, usage_limit=limit), time_limit_s=time_limit_s, seed=seed)
        except InfeasibleProblemError:
            break
        if not np.isfinite(solution.cost):
            break
        peak = peak_usage(problem, solution.choice)
        found.append((round(peak), solution.cost))
        limit = shrink * peak
    return undominated(found)


def undominated(points: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """The points than which no other has both less usage and less cost, the roomiest first."""
    kept: list[tuple[int, float]] = []
    for usage, cost in sorted(set(points)):
        if not kept or cost < kept[-1][1]:
            kept.append((usage, cost))
    return tuple(reversed(kept))
