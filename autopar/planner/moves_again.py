"""What it costs to give recomputed ops their inputs in the backward: moves that the forward has made already."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.planner.decisions import Decision
from autopar.planner.kept_experts import kept_bytes, kept_pairs
from autopar.planner.prices import Prices
from autopar.planner.residency import Residency
from autopar.planner.saved_values import is_view, late_decisions, roots_of
from autopar.sharding.layout import Layout, replicated
from autopar.sharding.reshard import moves_once, reshard_steps
from autopar.sharding.strategies import local_bytes

Matrix = npt.NDArray[np.float64]
Value = tuple[int, int, Layout]
"""A value in the layout in which it is read: decision, output, layout."""


@dataclass(frozen=True)
class Gather:
    """A parameter, or a value under views, whose gathered copy the backward may read as the forward has it, or gather
    again.

    Gathering again takes `seconds`; the copy's `bytes` are held from `end`, after its last reader in the forward, to
    `start`, its first in the backward, if it is kept. `views`: ops of the forward on the copy, which are to be
    recomputed for the backward to gather again. `is_direct`: the backward gathers by itself, unless `gathered_once`.
    `root`: the value that is gathered.

    Of a layer of experts, what the backward reads of its forward or computes again: `root` and the one of `views` are
    the backward.
    """

    root: int
    seconds: float
    bytes: int
    end: int
    start: int
    views: frozenset[int] = frozenset()
    is_direct: bool = False

    def is_kept(self, residency: Residency) -> bool:
        """Whether a residency keeps the copy."""
        return self.root in residency.gathered_once if self.is_direct else not self.views & residency.recomputed


def _joined(parts: Sequence[Gather]) -> Gather:
    """The gathers of one value, which are kept together or not."""
    return Gather(
        root=parts[0].root,
        seconds=sum(part.seconds for part in parts),
        bytes=sum(part.bytes for part in parts),
        end=max(part.end for part in parts),
        start=min(part.start for part in parts),
        views=frozenset().union(*(part.views for part in parts)),
        is_direct=any(part.is_direct for part in parts),
    )


@dataclass
class MovesAgain:
    """Seconds of moves under one choice of layouts. A value that the forward has moved once is read as it was moved,
    if it is kept; what is gathered is gathered again (`moves_once`), and so is all that is moved of a recomputed value.
    """

    decisions: Sequence[Decision]
    choice: Sequence[int]
    prices: Prices
    reads: Mapping[tuple[int, int], Matrix] = field(default_factory=dict)  # by reader and input: seconds, some hidden
    roots: list[int] = field(init=False)
    late: list[bool] = field(init=False)
    _seconds: dict[Value, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.roots, self.late = roots_of(self.decisions), late_decisions(self.decisions)
        self.last_early: dict[Value, int] = {}  # what the forward reads: its last reader
        self.first_late: dict[Value, int] = {}
        self._late_read: dict[Value, tuple[int, int]] = {}  # the same reader, and which of its inputs
        self._early_read: dict[Value, tuple[int, int]] = {}  # the first one in the forward
        for index, late in enumerate(self.late):
            for argument, value in enumerate(self._read(index)):
                if late:
                    self.first_late.setdefault(value, index)
                    self._late_read.setdefault(value, (index, argument))
                else:
                    self.last_early[value] = index
                    self._early_read.setdefault(value, (index, argument))

    def always(self, reader: int, saved: Container[int]) -> float:
        """Seconds of the moves into a recomputed op from what is no saved value: inputs of the program, small ones."""
        return sum(self._cost(value, kept=True) for value in self._read(reader) if self.roots[value[0]] not in saved)

    def between(self, root: int, reader: int) -> tuple[float, float]:
        """Seconds of the moves of a saved value into a recomputed op: (if the value is kept, if it is recomputed)."""
        values = [value for value in self._read(reader) if self.roots[value[0]] == root]
        return sum(self._cost(value, kept=True) for value in values), sum(
            self._cost(value, kept=False) for value in values
        )

    def to_backward(self, root: int) -> float:
        """Seconds that the backward's own reads cost more when a saved value is recomputed: its moves are repeated."""
        return sum(
            self._cost(value, kept=False) - self._cost(value, kept=True) for value in self._read_late.get(root, ())
        )

    @cached_property
    def _read_late(self) -> dict[int, dict[Value, None]]:
        """By root, what the backward reads, in order."""
        found: dict[int, dict[Value, None]] = {}
        for value in self.first_late:
            found.setdefault(self.roots[value[0]], {})[value] = None
        return found

    def backward(self, residency: Residency) -> float:
        """Seconds of all moves of the backward, each value to each layout once, and of what layers of experts compute
        again."""
        recomputed = residency.recomputed - self.experts.keys()
        readers = [index for index, late in enumerate(self.late) if late or index in recomputed]
        values = dict.fromkeys(value for index in readers for value in self._read(index))
        again = sum(self.experts[index].seconds for index in sorted(residency.recomputed & self.experts.keys()))
        return again + sum(
            self._cost(value, kept=self.roots[value[0]] not in recomputed)
            for value in values
            if not self.is_gathered(value, residency.gathered_once)
        )

    def is_gathered(self, value: Value, gathered_once: Container[int]) -> bool:
        """Whether the backward's read of a whole parameter, or of a view of it, is served by the forward's copy."""
        return self.roots[value[0]] in gathered_once and self._early_copy(value) is not None

    def _early_copy(self, value: Value) -> Value | None:
        index, output, target = value
        if target != replicated(len(target)):
            return None
        while (index, output, target) not in self.last_early:
            if not is_view(self.decisions[index]):
                return None
            index, output = self.decisions[index].sources[0].decision, self.decisions[index].sources[0].output
        return index, output, target

    @cached_property
    def gathers(self) -> dict[int, Gather]:
        """What the backward reads gathered: what keeping the forward's copy saves, and holds.

        By parameter; of another value that views are taken of, by the first of the views.
        """
        parts: dict[int, list[Gather]] = {}
        for root, values in self._read_late.items():
            if self.decisions[root].kind == "parameter":
                parts[root] = [*self._gathered_again(values), *self._gathered_below_views(root, values)]
            elif self.decisions[root].kind == "op" and not self.late[root]:
                found = list(self._gathered_below_views(root, values))
                parts[min((view for gather in found for view in gather.views), default=root)] = found
        return {key: _joined(found) for key, found in parts.items() if found} | self.experts

    @cached_property
    def experts(self) -> dict[int, Gather]:
        """By the backward of a layer of experts, what keeping the forward's rows and activation saves, and holds."""
        found = {}
        for backward, forward in kept_pairs(self.decisions, self.choice):
            call, pick = self.decisions[backward].call, self.choice[backward]
            assert call is not None
            seconds = self.prices.experts_again(call, self.decisions[backward].strategies[pick])
            bytes_ = kept_bytes(self.decisions[forward], self.choice[forward], self.prices.mesh.shape)
            found[backward] = Gather(backward, seconds, bytes_, forward + 1, backward, frozenset([backward]))
        return found

    def _gathered_again(self, values: Iterable[Value]) -> Iterator[Gather]:
        """What the backward gathers though the forward has: with `gathered_once` it reads the forward's copy."""
        for value in values:
            copy = self._early_copy(value)
            if self._whole_s(value) > 0 and copy is not None:
                end, start = self.last_early[copy] + 1, self.first_late[value]
                root, seconds = self.roots[value[0]], self._cost(value, kept=True)
                yield Gather(root, seconds, self._copy_bytes(copy), end, start, is_direct=True)

    def _gathered_below_views(self, root: int, values: Iterable[Value]) -> Iterator[Gather]:
        """Views that the forward takes of a gathered copy, and the backward reads: recomputed, they gather again."""
        served: dict[Value, tuple[set[int], int]] = {}  # by what is gathered: the views above it, the first reader
        for value in values:
            index, chain = value[0], set[int]()
            while is_view(self.decisions[index]) and not self.late[index]:
                chain.add(index)
                below = self._read(index)[0]
                if self._is_gathered_below(below):
                    views, start = served.get(below, (set(), self.first_late[value]))
                    served[below] = views | chain, min(start, self.first_late[value])
                index = below[0]
        for below, (views, start) in served.items():
            end = max([max(views), *(self._last_early[view] for view in views if view in self._last_early)]) + 1
            seconds = self._cost(below, kept=False)
            yield Gather(root, seconds, self._copy_bytes(below), end, start, frozenset(views))

    def _is_gathered_below(self, below: Value) -> bool:
        """Whether a view reads a copy that takes a move, and is larger than what a value keeps of itself."""
        index, output, target = below
        own = self.decisions[index].strategies[self.choice[index]].outputs[output]
        is_parameter = self.decisions[self.roots[index]].kind == "parameter"
        once = not is_parameter and moves_once(own, target, self.prices.mesh.shape)
        return not once and self._whole_s(below) > 0

    @cached_property
    def _last_early(self) -> dict[int, int]:
        """The last reader in the forward of each decision that the forward reads."""
        found: dict[int, int] = {}
        for (index, _, _), last in self.last_early.items():
            found[index] = max(last, found.get(index, last))
        return found

    def _copy_bytes(self, value: Value) -> int:
        spec = self.decisions[value[0]].specs[value[1]]
        assert spec is not None
        return local_bytes(spec, value[2], self.prices.mesh.shape)

    def _read(self, reader: int) -> list[Value]:
        decision = self.decisions[reader]
        targets = decision.strategies[self.choice[reader]].inputs
        return [(it.decision, it.output, target) for it, target in zip(decision.sources, targets, strict=True)]

    def _cost(self, value: Value, *, kept: bool) -> float:
        """Seconds of a move, as the search problem has it, which hides some behind computation: of a kept value into
        the backward; into ops that are recomputed, as in the forward."""
        index, output, target = value
        layout = self.decisions[index].strategies[self.choice[index]].outputs[output]
        if layout == target:
            return 0.0
        is_op, is_early = self.decisions[index].kind == "op", value in self._early_read
        if kept and is_op and is_early and moves_once(layout, target, self.prices.mesh.shape):
            return 0.0
        read = self._late_read.get(value) if kept else None
        read = read or self._early_read.get(value)
        if read is not None and read in self.reads:
            return float(self.reads[read][self.choice[index], self.choice[read[0]]])
        return self._whole_s(value)

    def _whole_s(self, value: Value) -> float:
        """Seconds of a move with nothing hidden."""
        index, output, target = value
        producer = self.decisions[index]
        layout, spec = producer.strategies[self.choice[index]].outputs[output], producer.specs[output]
        assert spec is not None
        if layout != target and value not in self._seconds:
            steps = reshard_steps(spec, layout, target, self.prices.mesh.shape, self.prices.collective)
            self._seconds[value] = sum(step.seconds for step in steps)
        return self._seconds.get(value, 0.0)
