"""What becomes of values between the forward and the backward, by decision."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Residency:
    """Where it is not the usual one.

    `recomputed`: ops of the forward whose values are not kept. `gathered_once`: parameters whose copies, gathered for
    the forward, are kept for the backward; the usual is to gather the stored shards again.
    """

    recomputed: frozenset[int] = frozenset()
    gathered_once: frozenset[int] = frozenset()

    def of(self, index: int) -> str:
        """`recompute` or `keep` where a decision's residency is not the usual one, else nothing."""
        return "recompute" if index in self.recomputed else "keep" if index in self.gathered_once else ""


USUAL = Residency()
