"""What it costs to pack saved values, and what is then held: the prices of the residencies beside keep and recompute.

A form on the device costs two kernels, over what they read and write. A copy to the host and back takes the host link's
time, one direction beside the other, and costs nothing where it is hidden: where it is done by when `passes.pack_saved`
waits for it, computation going on. The link's time is given to the values that would take longest to recompute, per
byte, as long as all their copies meet their waits one after the other; the copies of others are priced as if nothing
hid them.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from autopar.passes.host_copies import HEAVY_OPS
from autopar.passes.packings import Form
from autopar.passes.schedule_collectives import HEAVY_NAMES
from autopar.planner.decisions import Decision
from autopar.planner.hosting import Hosting
from autopar.planner.prices import Prices
from autopar.planner.saved_forms import SavedForms
from autopar.planner.saved_values import Packed, Piece, SavedValue, SavedValues, State, late_decisions, moment
from autopar.sharding.op_call import TensorSpec
from autopar.sharding.strategies import local_bytes

Array = npt.NDArray[np.float64]
GAIN = 0.75  # of a value: a form on the device that holds more of it is not worth having


@dataclass(frozen=True)
class Packing:
    """What may be packed of one program. `words`: the residencies that a search may choose among. `hosted`: the
    parameters that may lie on the host; None where none may."""

    decisions: Sequence[Decision]
    prices: Prices
    words: tuple[str, ...]
    hosted: Hosting | None = None

    @classmethod
    def of(
        cls, decisions: Sequence[Decision], prices: Prices, lossy: str = "", hosted: Hosting | None = None
    ) -> Packing:
        """With the exact residencies, and the lossy one that is allowed, if any.

        A device that is its own host gains nothing by offloading: there it is left to pins.
        """
        exact = ("compress",) if prices.device.is_host else ("offload", "compress")
        return cls(decisions, prices, (*exact, lossy) if lossy else exact, hosted)

    def hosting_only(self, hosted: Set[int]) -> Packing:
        """The same, where these parameters lie on the host and no others may."""
        names = frozenset(self.decisions[index].name for index in hosted)
        return replace(self, hosted=replace(self.hosting, fixed=names))

    @cached_property
    def hosting(self) -> Hosting:
        """Which parameters may lie on the host."""
        return self.hosted or Hosting(self.decisions, self.prices, fixed=frozenset())

    @cached_property
    def forms(self) -> SavedForms:
        return SavedForms(self.decisions)

    @cached_property
    def link(self) -> HostLink:
        return HostLink(self.decisions, self.prices)


@dataclass(frozen=True)
class PackedValues:
    """The saved values of a program as they may be packed. `others`: residencies that some have beside those of a
    search."""

    saved: SavedValues
    packing: Packing
    others: frozenset[str] = frozenset()

    @property
    def decisions(self) -> Sequence[Decision]:
        return self.packing.decisions

    @property
    def prices(self) -> Prices:
        return self.packing.prices

    @property
    def forms(self) -> SavedForms:
        return self.packing.forms

    def of(self, index: int, pin: str | None = None) -> tuple[str, ...]:
        """The residencies that a search may choose for a saved value, or the one that is pinned."""
        if pin is not None:
            return (pin,) if self.forms.of(index, pin) else ()
        return tuple(word for word in self.packing.words if self._gains(index, word))

    def _gains(self, index: int, word: str) -> bool:
        found = self.forms.of(index, word)
        needed = set(self.saved.values[index].outputs) & found.keys()
        specs = {output: self.decisions[index].specs[output] for output in self.saved.values[index].outputs}
        whole = sum(spec.nbytes for spec in specs.values() if spec is not None)
        packed = sum(
            found[output].bytes_(spec.numel, spec.dtype) if output in found else spec.nbytes
            for output, spec in specs.items()
            if spec is not None
        )
        return bool(needed) and packed <= GAIN * whole

    def states(self, index: int, pin: str | None = None) -> tuple[Packed, ...]:
        """The states of a saved value in which it is packed: it is there again at its first reader."""
        return tuple(Packed(word, self.saved.values[index].starts[-1]) for word in self.of(index, pin))

    def bytes(self, index: int, word: str, pick: int) -> int:
        """Held of a value between the phases when it is packed, on the largest shard."""
        return sum(
            form.bytes_(bytes_ // spec.dtype.itemsize, spec.dtype) if form is not None else bytes_
            for form, spec, bytes_ in self._outputs(index, word, pick)
        )

    def seconds(self, index: int, word: str, pick: int) -> float:
        """What packing and unpacking a value costs."""
        total = 0.0
        for form, spec, bytes_ in self._outputs(index, word, pick):
            if form is not None and form.on_host:
                total += self._copy_s(index, bytes_)
            elif form is not None:
                total += 2 * self.prices.kernel(bytes_ + form.bytes_(bytes_ // spec.dtype.itemsize, spec.dtype))
        return total

    def _outputs(self, index: int, word: str, pick: int) -> list[tuple[Form | None, TensorSpec, int]]:
        decision, forms = self.decisions[index], self.forms.of(index, word)
        layouts, shape = decision.strategies[pick].outputs, self.prices.mesh.shape
        outputs = self.saved.values[index].outputs if index in self.saved.values else tuple(forms)
        specs = [(output, decision.specs[output]) for output in outputs]
        return [
            (forms.get(output), spec, local_bytes(spec, layouts[output], shape))
            for output, spec in specs
            if spec is not None
        ]

    def _copy_s(self, index: int, bytes_: int) -> float:
        """To the host and back: where it is hidden, what it slows computation down by, and its launches."""
        both = 2 * self.prices.host_copy(bytes_)
        if index not in self.packing.link.hidden:
            return both
        return both * (1.0 - self.prices.mesh.profile.overlap) + 2 * self.prices.device.launch_s

    def pieces(self, index: int, value: SavedValue, base: Sequence[Piece]) -> list[Piece]:
        """The pieces of a value that may be packed, from those of the value that may not."""
        words = sorted({*self.packing.words, *self.others})
        words = [word for word in words if self.forms.of(index, word)]
        count, found = len(self.decisions), []
        for piece in base:
            again: set[State] = {Packed(word, it) for word in words for it in piece.states if isinstance(it, int)}
            found.append(Piece(piece.start, piece.end, piece.states | again))
        for start in value.starts if words else ():
            found += [piece for word in words for piece in self._between(index, value, Packed(word, start), count)]
        return [piece for piece in found if piece.start < piece.end]

    def _between(self, index: int, value: SavedValue, state: Packed, count: int) -> list[Piece]:
        """In its form between the phases; as it is until its copy is complete, and from where it is copied back."""
        begin, states = moment(state.start, index, count), frozenset({state})
        pieces = [Piece(value.forward_end, begin, states, state.word)]
        if any(form.on_host for form in self.forms.of(index, state.word).values()):
            link = self.packing.link
            ahead = moment(link.prefetch(state.start), 0, count)
            released = min(moment(link.release(value), 0, count), ahead)
            pieces += [Piece(value.forward_end, released, states), Piece(max(released, ahead), begin, states)]
        return pieces


@dataclass(frozen=True)
class HostLink:
    """When copies to the host and back run, and which of them computation hides."""

    decisions: Sequence[Decision]
    prices: Prices

    @cached_property
    def saved(self) -> SavedValues:
        return SavedValues(self.decisions)

    def release(self, value: SavedValue) -> int:
        """The decision by which a copy to the host is waited for."""
        last = value.forward_end // (len(self.decisions) + 1)
        heavy = self._heavy[0]
        place = int(np.searchsorted(heavy, last)) + HEAVY_OPS - 1
        return int(heavy[place]) + 1 if place < len(heavy) else self.saved.backward_start

    def prefetch(self, start: int) -> int:
        """The decision at which the copy back begins, of what is read at `start`."""
        heavy = self._heavy[1]
        place = int(np.searchsorted(heavy, start)) - HEAVY_OPS
        return int(heavy[place]) if place >= 0 else min(start, self.saved.backward_start)

    @cached_property
    def _heavy(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The heavy ops of the forward, and of the backward."""
        found: tuple[list[int], list[int]] = ([], [])
        for index, (decision, late) in enumerate(zip(self.decisions, late_decisions(self.decisions), strict=True)):
            if decision.call is not None and decision.call.name.split(".")[1] in HEAVY_NAMES:
                found[late].append(index)
        return np.array(found[0], dtype=np.int64), np.array(found[1], dtype=np.int64)

    @cached_property
    def hidden(self) -> frozenset[int]:
        """The values whose copies to the host and back all fit beside computation, if these are all that are copied."""
        if self.prices.mesh.profile.overlap == 0:
            return frozenset()
        ops = [float(item.seconds.min()) if item.kind == "op" else 0.0 for item in self.decisions]
        clock = np.array([0.0, *accumulate(ops)])
        worth = {index: ops[index] / max(1, self._least_bytes(index)) for index in self.saved.values}
        link = _Link()
        for index in sorted(worth, key=lambda it: (-worth[it], it)):
            value, seconds = self.saved.values[index], self.prices.host_copy(self._least_bytes(index))
            start = value.starts[-1]
            there = float(clock[index + 1]), float(clock[max(self.release(value), index + 1)])
            back = float(clock[min(self.prefetch(start), start)]), float(clock[start])
            link.add(index, seconds, (there, back))
        return frozenset(link.taken)

    def _least_bytes(self, index: int) -> int:
        return int(self.decisions[index].bytes.min())


class _Link:
    """The copies that a link can make in time, both ways: (begins at the earliest, is due)."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self._queues = [_Queue(), _Queue()]

    def add(self, index: int, seconds: float, windows: tuple[tuple[float, float], tuple[float, float]]) -> None:
        """Take the copies of one more value, if all are still in time."""
        fresh = [queue.joined(seconds, *window) for queue, window in zip(self._queues, windows, strict=True)]
        if fresh[0].is_in_time and fresh[1].is_in_time:
            self._queues = fresh
            self.taken.append(index)


@dataclass(frozen=True)
class _Queue:
    """Copies of one direction, first come, first served."""

    starts: Array = field(default_factory=lambda: np.zeros(0))
    seconds: Array = field(default_factory=lambda: np.zeros(0))
    dues: Array = field(default_factory=lambda: np.zeros(0))

    def joined(self, seconds: float, start: float, due: float) -> _Queue:
        place = int(np.searchsorted(self.starts, start, side="right"))
        pairs = zip((self.starts, self.seconds, self.dues), (start, seconds, due), strict=True)
        return _Queue(*(np.insert(old, place, new) for old, new in pairs))

    @property
    def is_in_time(self) -> bool:
        ends = np.cumsum(self.seconds)
        done = ends + np.maximum.accumulate(self.starts - (ends - self.seconds))
        return bool((done <= self.dues + 1e-12).all())
