"""What becomes of values between the forward and the backward, by decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

HOSTED = "offload"
"""The word for a parameter that lies on the host."""


@dataclass(frozen=True)
class Residency:
    """Where it is not the usual one.

    `recomputed`: ops of the forward whose values are not kept, and backwards of layers of experts that read nothing of
    their forward (`kept_experts`). `gathered_once`: parameters whose copies, gathered for the forward, are kept for the
    backward; the usual is to gather the stored shards again. `packed`: ops whose values are held in another form, each
    with the word for it (`passes.packings.PACKED`). `hosted`: parameters that lie on the host, with their gradients and
    the optimizer's state of them.
    """

    recomputed: frozenset[int] = frozenset()
    gathered_once: frozenset[int] = frozenset()
    packed: frozenset[tuple[int, str]] = frozenset()
    hosted: frozenset[int] = frozenset()

    @cached_property
    def words(self) -> Mapping[int, str]:
        """By decision, how its value is packed."""
        return dict(self.packed)

    def of(self, index: int) -> str:
        """The word for a decision's residency where it is not the usual one, else nothing."""
        if index in self.words:
            return self.words[index]
        if index in self.hosted:
            return HOSTED
        return "recompute" if index in self.recomputed else "keep" if index in self.gathered_once else ""


USUAL = Residency()
