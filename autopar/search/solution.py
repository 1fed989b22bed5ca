"""What a search strategy gives back: a choice, its cost, and how much better any other choice could be."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Solution:
    """A feasible choice with a proven bound; costs in the problem's own unit.

    Invariant: `bound` <= cost of every feasible choice (`-math.inf` where the strategy proves nothing). A strategy that
    saw no feasible choice returns its least infeasible one with `cost == math.inf`.
    """

    choice: tuple[int, ...]  # one strategy index per node
    cost: float
    bound: float = -math.inf
    strategy: str = ""
    seconds: float = 0.0
    trace: tuple[tuple[float, float, float], ...] = ()  # (seconds, incumbent, bound), as they improved

    @property
    def gap(self) -> float:
        """(cost - bound) / |cost|: 0 is proven optimal, `math.inf` is nothing known."""
        if self.cost == self.bound:
            return 0.0
        if not (math.isfinite(self.cost) and math.isfinite(self.bound)) or self.cost == 0:
            return math.inf
        return max(0.0, (self.cost - self.bound) / abs(self.cost))
