"""The time that all searches of one plan share, measured so that a busy machine finds the plan of an idle one."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

LEAST_S = 1.0  # of one search, however late it is: a plan is worth more than the second
SHARE = 1 / 3  # of what is left, for one search
MOST_SLOWDOWN = 8.0  # a search never gets more wall clock than so many times its seconds


@dataclass(frozen=True)
class Budget:
    """Seconds of this process's processor time from when it is made; each search gets a share of what is left."""

    total_s: float
    wall_start: float = field(init=False, default_factory=lambda: time.monotonic())
    start: float = field(init=False, default_factory=lambda: time.process_time())

    @property
    def left_s(self) -> float:
        return self.total_s - (time.process_time() - self.start)

    @property
    def is_spent(self) -> bool:
        return self.left_s <= 0

    @property
    def slowdown(self) -> float:
        """Wall clock per second of processor time so far: what neighbours on the machine cost."""
        used = time.process_time() - self.start
        return min(MOST_SLOWDOWN, max(1.0, (time.monotonic() - self.wall_start) / max(used, 0.1)))

    @property
    def share_s(self) -> float:
        """Wall clock of one search that begins now."""
        return max(LEAST_S, SHARE * self.left_s) * self.slowdown
