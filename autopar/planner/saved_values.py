"""Which values of the forward the backward needs, and when: what there is to keep or to recompute."""

from __future__ import annotations

import bisect
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from autopar.planner.decisions import Decision
from autopar.planner.prices import VIEWS
from autopar.sharding.strategies import local_bytes

FRACTION = 1e-4  # of all that the backward reads: a smaller value is kept, whatever happens
WINDOW = 6  # values to either side among which a narrow cut has the fewest bytes


KEEP, FREE, ON_HOST = "keep", "free", "on the host"


class Packed(NamedTuple):
    """Held in another form until a time (a decision index), from which on it is there as it was."""

    word: str
    start: int


State = str | int | Packed
"""KEEP, FREE, the time (a decision index) at which the value is recomputed, or how it is packed; of a parameter, KEEP
or ON_HOST."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A half-open interval of moments, and the states of a value that hold it throughout: as it is, or `packed`."""

    start: int
    end: int
    states: frozenset[State]
    packed: str = ""


@dataclass(frozen=True, slots=True)
class SavedValue:
    """The value of an op of the forward that the backward needs, itself or to recompute others from it.

    Times are decision indices. Right before one the backward recomputes, op after op; a *moment* counts these steps too
    (see `moment`). `direct`: read by the backward as it is, not only by recomputation. `starts`: when it may be
    recomputed, ascending; the last is its first reader's. `forward_end`, `end`: the moments after its last reader in
    the forward, and in all, recomputation included. `readers`: the saved values that are computed from it. `outputs`:
    those of the op that matter.
    """

    decision: int
    direct: bool
    starts: tuple[int, ...]
    forward_end: int
    end: int
    readers: tuple[int, ...]
    outputs: tuple[int, ...]
    is_read_forward: bool

    @property
    def passing(self) -> bool:
        """Whether it is recomputed for one other recomputed value alone, at the same time."""
        return not self.direct and len(self.readers) == 1

    def nearest(self, time: int) -> int:
        """The last of `starts` that is not after `time`, or else the first."""
        return max([start for start in self.starts if start <= time], default=self.starts[0])

    def pieces(self, count: int) -> list[Piece]:
        """When it is held after the forward, in which state; of `count` decisions."""
        begins = [moment(start, self.decision, count) for start in self.starts]
        if self.passing:
            ends = [moment(start, self.readers[0], count) + 1 for start in self.starts]
            edges = [self.forward_end, *(edge for pair in zip(begins, ends, strict=True) for edge in pair), self.end]
            found = []
            for number, (start, end) in enumerate(pairwise(edges)):
                own = {self.starts[number // 2]} if number % 2 else set()
                found.append(Piece(start, end, frozenset({KEEP, *own})))
        else:
            edges = [self.forward_end, *begins, self.end]
            found = [
                Piece(start, end, frozenset({KEEP, *self.starts[:number]}))
                for number, (start, end) in enumerate(pairwise(edges))
            ]
        return [piece for piece in found if piece.start < piece.end]

    def bytes(self, decision: Decision, pick: int, mesh_shape: Sequence[int]) -> int:
        """Bytes held when it is kept or recomputed, on the largest shard."""
        if len(decision.specs) == len(self.outputs):
            return int(decision.bytes[pick])
        layouts = decision.strategies[pick].outputs
        held = [(decision.specs[output], layouts[output]) for output in self.outputs]
        return sum(local_bytes(spec, layout, mesh_shape) for spec, layout in held if spec is not None)


@dataclass(frozen=True)
class SavedValues:
    """The saved values of a program by decision, in program order.

    `levels`: how many times before its first reader a value may be recomputed at: so many narrow cuts of the program,
    and as many of the times at which what is computed from it is. `also`: decisions that count however small they are.
    """

    decisions: Sequence[Decision]
    levels: int = 0
    also: Set[int] = frozenset()
    values: dict[int, SavedValue] = field(init=False)
    checkpoints: frozenset[int] = field(init=False)  # the values that cross a narrow cut of the forward

    def __post_init__(self) -> None:
        finder = _Finder(self.decisions, self.levels)
        object.__setattr__(self, "values", finder.found(self.also))
        object.__setattr__(self, "checkpoints", frozenset(finder.checkpoints))

    @cached_property
    def backward_start(self) -> int:
        """The first decision of the backward."""
        return next((index for index, late in enumerate(late_decisions(self.decisions)) if late), len(self.decisions))

    def closed(self, recomputed: Set[int]) -> frozenset[int]:
        """With the views of what is recomputed: they are taken again."""
        late, found = late_decisions(self.decisions), set(recomputed)
        for index, decision in enumerate(self.decisions):
            if is_view(decision) and not late[index] and decision.sources[0].decision in found:
                found.add(index)
        return frozenset(found)


def moment(time: int, step: int, count: int) -> int:
    """The moment of `count` decisions at which decision `step` is recomputed for decision `time`; `step` of `count`: at
    which that decision itself runs."""
    return time * (count + 1) + step


def is_view(decision: Decision) -> bool:
    """Whether the op returns a view of its first input."""
    return decision.call is not None and decision.call.name in VIEWS and bool(decision.sources)


def late_decisions(decisions: Sequence[Decision]) -> list[bool]:
    """Per decision, whether it belongs to the backward: of its phase, and no result of the forward needs it."""
    needed = [decision.kind == "result" for decision in decisions]
    for index in range(len(decisions) - 1, -1, -1):
        if needed[index]:
            for source in decisions[index].sources:
                needed[source.decision] = True
    return [
        decision.kind == "gradient" or (decision.kind == "op" and decision.phase == "backward" and not needed[index])
        for index, decision in enumerate(decisions)
    ]


def roots_of(decisions: Sequence[Decision]) -> list[int]:
    """Per decision, the value of its own under a chain of views."""
    roots = list(range(len(decisions)))
    for index, decision in enumerate(decisions):
        if is_view(decision):
            roots[index] = roots[decision.sources[0].decision]
    return roots


class _Finder:
    def __init__(self, decisions: Sequence[Decision], levels: int) -> None:
        self.decisions, self.levels = decisions, levels
        self.late, self.roots = late_decisions(decisions), roots_of(decisions)
        count = len(decisions)
        self.checkpoints: set[int] = set()
        self.early_readers: list[list[int]] = [[] for _ in range(count)]  # by root; views among them
        self.late_readers: list[list[int]] = [[] for _ in range(count)]
        self.outputs: list[dict[int, list[int]]] = [{} for _ in range(count)]  # by root and output: readers
        for index, decision in enumerate(decisions):
            for source in decision.sources:
                root = self.roots[source.decision]
                (self.late_readers if self.late[index] else self.early_readers)[root].append(index)
                output = source.output if root == source.decision else None
                for number in [output] if output is not None else range(len(decisions[root].specs)):
                    self.outputs[root].setdefault(number, []).append(index)

    def found(self, also: Set[int]) -> dict[int, SavedValue]:
        possible = [index for index in range(len(self.decisions)) if self._may_be_recomputed(index)]
        read = sum(float(self.decisions[index].bytes.min()) for index in possible if self.late_readers[index])
        large = {index for index in possible if float(self.decisions[index].bytes.max()) >= FRACTION * read}
        large |= also & set(possible)
        grid = self._grid(sorted(large))
        values: dict[int, SavedValue] = {}
        for index in sorted(large, reverse=True):
            value = self._value(index, values, grid)
            if value is not None:
                values[index] = value
        return dict(sorted(values.items()))

    def _may_be_recomputed(self, index: int) -> bool:
        return self.decisions[index].kind == "op" and not self.late[index] and self.roots[index] == index

    def _value(self, index: int, values: dict[int, SavedValue], grid: list[int]) -> SavedValue | None:
        late = self.late_readers[index]
        readers = tuple(sorted({reader for reader in self.early_readers[index] if reader in values}))
        if not late and not readers:
            return None
        count = len(self.decisions)
        again = [moment(values[reader].starts[-1], reader, count) + 1 for reader in readers]
        first = min(late) if late else max(values[reader].starts[-1] for reader in readers)
        place = bisect.bisect_left(grid, first)
        earlier = {*grid[max(0, place - self.levels) : place]}
        inherited = sorted({start for reader in readers for start in values[reader].starts if start < first})
        earlier.update(inherited[max(0, len(inherited) - self.levels) :])
        starts = (*(sorted(earlier) if self.levels else ()), first)
        if not late and len(readers) == 1:
            starts = values[readers[0]].starts
        needed = {*late, *readers}
        outputs = tuple(
            sorted(number for number, reading in self.outputs[index].items() if self._matters(reading, needed))
        )
        return SavedValue(
            decision=index,
            direct=bool(late),
            starts=starts,
            forward_end=moment(max([index, *self.early_readers[index]]) + 1, 0, count),
            end=max([*(moment(reader + 1, 0, count) for reader in late), *again]),
            readers=readers,
            outputs=outputs,
            is_read_forward=bool(self.early_readers[index]),
        )

    def _matters(self, reading: list[int], needed: set[int]) -> bool:
        return any(reader in needed or is_view(self.decisions[reader]) for reader in reading)

    def _grid(self, large: list[int]) -> list[int]:
        """Times at which the backward crosses a narrow cut of the forward: it first needs a value from before it."""
        changes = np.zeros(len(self.decisions) + 1)
        lasts = np.array([max([index, *self.early_readers[index]]) for index in large], dtype=np.int64)
        for index, last in zip(large, lasts.tolist(), strict=True):
            least = float(self.decisions[index].bytes.min())
            changes[index] += least
            changes[last] -= least
        crossing = np.cumsum(changes)[large] if large else changes[:0]
        firsts = [min(self.late_readers[index], default=len(self.decisions)) for index in large]
        behind = np.argsort(lasts, kind="stable")  # what crosses a cut is kept there: it waits for nobody
        first_behind = np.minimum.accumulate(np.array([len(self.decisions), *np.array(firsts, np.int64)[behind]]))
        first_before = first_behind[np.searchsorted(lasts[behind], large, side="right")]
        found = set()
        for place, bytes_ in enumerate(crossing):
            if bytes_ <= crossing[max(0, place - WINDOW) : place + WINDOW + 1].min():
                found.add(int(first_before[place]))
                across = np.flatnonzero(lasts[: place + 1] > large[place])
                self.checkpoints.update(large[own] for own in across.tolist())
        starts = [index for index, late in enumerate(self.late) if late][:1]
        return sorted({*found, *starts} - {len(self.decisions)})
