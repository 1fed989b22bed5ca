"""A first residency that fits: what frees most bytes per second is not kept, but recomputed or packed, first of all.

Layers decide one by one, the early ones first: what they hold lives longest, and is recomputed when the rest is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.passes.packings import PACKED
from autopar.planner.recomputation import Recomputation, with_gathers
from autopar.planner.residency import Residency

Array = npt.NDArray[np.float64]
LENGTHS = 9  # of the order, from nothing dropped to all of it, among which to look for one that fits


def on_host(index: int) -> int:
    """A parameter in the order, apart from its gathered copy, which has the parameter's index."""
    return ~index


@dataclass(frozen=True)
class CheapestFirst:
    """Residencies of one choice of layouts, from nothing dropped to all that may be."""

    of: Recomputation

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Saved values, gathered copies, parameters (as `on_host`) by seconds per byte, without what is pinned."""
        of, gathers = self.of, self.of.moves.gathers
        found = [(gather.seconds / gather.bytes, index) for index, gather in gathers.items() if gather.bytes]
        found += [(self._seconds(index) / held, index) for index, held in of.bytes.items() if held]
        found = [item for item in found if of.pins.get(item[1]) is None]
        hosting, choice = of.packed.packing.hosting, of.choice
        found += [(of.seconds_on_host(it) / hosting.bytes(it, choice[it]), on_host(it)) for it in of.open]
        return tuple(index for _, index in sorted(found))

    def _seconds(self, index: int) -> float:
        word = self.words.get(index)
        return self.of.seconds[index] if word is None else self.of.packed.seconds(index, word, self.of.choice[index])

    @cached_property
    def words(self) -> dict[int, str]:
        """How to pack the saved values that cost less so than recomputed, whoever is recomputed from them."""
        of, found = self.of, dict[int, str]()
        for index, value in of.saved.values.items():
            words = [it for it in of.packed.of(index) if of.packed.forms.is_whole(index, it) or not value.readers]
            cost = {it: of.packed.seconds(index, it, of.choice[index]) for it in words}
            best = min(cost, key=cost.__getitem__, default=None)
            if best is not None and cost[best] < of.seconds[index]:
                found[index] = best
        return found

    def under(self, constant: Array, limit: float) -> Residency | None:
        """As little dropped as is foreseen to fit; None where none of `LENGTHS` does, for more is not always less."""
        few = -1
        for enough in np.unique(np.linspace(0, len(self.order), LENGTHS).astype(int)).tolist():
            if self._most(enough, constant) <= limit:
                break
            few = enough
        else:
            return None
        while enough - few > 1:
            middle = (few + enough) // 2
            if self._most(middle, constant) <= limit:
                enough = middle
            else:
                few = middle
        return self.residency(self._needed(self.order[:enough], constant, limit))

    def _most(self, dropped: int, constant: Array) -> float:
        """The most that is held with so many of the order dropped."""
        return float(self._levels(self.order[:dropped], constant).max(initial=0.0))

    def residency(self, dropped: Collection[int]) -> Residency:
        """What is dropped is not kept; what is pinned is as it is pinned."""
        of, gathers = self.of, self.of.moves.gathers
        first = {*dropped, *(index for index, pin in of.pins.items() if pin == "recompute")}
        packed = {(index, self.words[index]) for index in dropped if index in self.words}
        packed |= {(index, pin) for index, pin in of.pins.items() if pin in PACKED and index in of.saved.values}
        again = of.saved.closed((first & of.saved.values.keys()) - {index for index, _ in packed})
        hosted = of.given | {index for index in of.open if on_host(index) in dropped}
        own = Residency(again, packed=frozenset(packed), hosted=hosted)
        return with_gathers(own, gathers, gathers.keys() - first)

    def _levels(self, dropped: Collection[int], constant: Array) -> Array:
        return self.of.levels(self.residency(dropped), constant)

    def _needed(self, dropped: Sequence[int], constant: Array, limit: float) -> list[int]:
        """`dropped` without what fits after all, the dearest first: it is not held when memory is tight."""
        of = self.of
        levels, states = self._levels(dropped, constant), of.states(self.residency(dropped))
        needed = []
        for index in reversed(dropped):
            value, state = of.saved.values.get(index), states.get(index)
            if value is None or not value.direct or state is None:
                needed.append(index)
                continue
            spans = list(of.held_longer(index, state))
            if all(levels[first:last].max(initial=0.0) + of.bytes[index] <= limit for first, last in spans):
                for first, last in spans:
                    levels[first:last] += of.bytes[index]
            else:
                needed.append(index)
        return needed
