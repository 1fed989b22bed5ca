"""The time that all searches of one plan share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

LEAST_S = 1.0  # of one search, however late it is: a plan is worth more than the second
SHARE = 1 / 3  # of what is left, for one search


@dataclass(frozen=True)
class Budget:
    """Seconds of wall clock from when it is made; each search gets a share of what is left."""

    total_s: float
    end: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "end", time.monotonic() + self.total_s)

    @property
    def is_spent(self) -> bool:
        return time.monotonic() >= self.end

    @property
    def share_s(self) -> float:
        """Of one search that begins now."""
        return max(LEAST_S, SHARE * (self.end - time.monotonic()))
