"""What to keep, to pack and to recompute under fixed layouts, as a search problem: every layer for itself.

A saved value is a node with the strategies keep, recompute (at one of several times), one for each form in which it may
be packed and, where the backward reads it only to recompute others, free. An edge forbids recomputing a value from one
that is not there by then, and holds the price of moving it again. The formulation is that of Checkmate (Jain et al.,
MLSys 2020), in which a value is recomputed at most once, right before its first reader. What the rest of the program
holds is constant, and known exactly: it is what the emitted program holds, less the saved values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from autopar.planner.decisions import Decision
from autopar.planner.hosting import Life
from autopar.planner.moves_again import Gather, MovesAgain
from autopar.planner.packed_values import PackedValues
from autopar.planner.residency import Residency
from autopar.planner.saved_values import FREE, KEEP, ON_HOST, Packed, Piece, SavedValue, SavedValues, State, moment
from autopar.search import FORBIDDEN, Problem

Array = npt.NDArray[np.float64]


def states_of(value: SavedValue, pin: str | None, packed: tuple[Packed, ...] = ()) -> tuple[State, ...]:
    """The states of a saved value; a pin leaves only those that meet it. `packed`: those in which it is packed."""
    kept: tuple[State, ...] = (KEEP,) if value.direct else (FREE, KEEP)
    if pin is not None:
        return kept if pin == "keep" else value.starts if pin == "recompute" else packed
    return (*kept, *value.starts, *packed)


def is_there(source: State, reader: State, *, passing: bool = False) -> bool:
    """Whether a source in its state is there when its reader is recomputed, or need not be.

    A `passing` source is recomputed at the very time of its reader. A packed one is there once it is unpacked: the
    caller says whether what is unpacked will do.
    """
    if not isinstance(reader, int):
        return True
    if isinstance(source, Packed):
        source = source.start
    if isinstance(source, int):
        return source == reader if passing else source <= reader
    return source in (KEEP, ON_HOST)


def with_gathers(residency: Residency, gathers: Mapping[int, Gather], kept: Set[int]) -> Residency:
    """A residency in which the copies of the parameters in `kept` are kept, and those of the others gathered again."""
    once = {gathers[key].root for key in kept if gathers[key].is_direct}
    views = [gather.views for key, gather in gathers.items() if key not in kept]
    return replace(residency, recomputed=residency.recomputed.union(*views), gathered_once=frozenset(once))


@dataclass(frozen=True)
class Recomputation:
    """The problem of one choice of layouts: what each saved value costs to recompute or to pack, and holds."""

    saved: SavedValues
    decisions: Sequence[Decision]
    choice: Sequence[int]
    mesh_shape: tuple[int, ...]
    moves: MovesAgain
    pins: Mapping[int, str]
    packed: PackedValues

    @cached_property
    def bytes(self) -> dict[int, int]:
        """What each saved value holds."""
        choice, shape = self.choice, self.mesh_shape
        return {it: value.bytes(self.decisions[it], choice[it], shape) for it, value in self.saved.values.items()}

    @cached_property
    def seconds(self) -> dict[int, float]:
        """What recomputing each saved value takes, with the moves of inputs that are there in any case."""
        return {index: self._seconds(index) for index in self.saved.values}

    def _seconds(self, index: int) -> float:
        own = (
            float(self.decisions[index].seconds[self.choice[index]])
            if self.saved.values[index].is_read_forward
            else 0.0
        )
        return own + self.moves.always(index, self.saved.values) + self.moves.to_backward(index)

    def held(self, residency: Residency, moments: npt.NDArray[np.int64]) -> Array:
        """Bytes of the saved values and gathered copies at some moments, from the end of their forward on."""
        times, sums = self._profile(residency)
        held: Array = sums[np.searchsorted(times, moments, side="right")]
        return held

    def levels(self, residency: Residency, constant: Array) -> Array:
        """The most that is held in each slot (`slots`), with `constant` (as in `problem`) beside it."""
        times, sums = self._profile(residency)
        most = sums[np.searchsorted(times, self.slots, side="right")]
        np.maximum.at(most, np.searchsorted(self.slots, times, side="right") - 1, sums[1:])
        found: Array = most + constant.reshape(-1)
        return found

    @cached_property
    def slots(self) -> npt.NDArray[np.int64]:
        """When each number of `constant` begins to hold: two moments per decision."""
        count = len(self.decisions)
        starts = np.arange(count) * (count + 1)
        return np.stack([starts, starts + count], axis=1).reshape(-1)

    def held_longer(self, index: int, state: State) -> Iterator[tuple[int, int]]:
        """Ranges of slots in which a saved value is held if it is kept, but not in `state`."""
        for piece in self._pieces[index]:
            if KEEP in piece.states and state not in piece.states:
                yield self._slots_of(piece.start, piece.end)

    def _slots_of(self, start: int, end: int) -> tuple[int, int]:
        first, last = np.searchsorted(self.slots, [start, end - 1], side="right").tolist()
        return first - 1, last

    def _profile(self, residency: Residency) -> tuple[npt.NDArray[np.int64], Array]:
        """The moments at which what is held changes, and the bytes before the first and after each of them."""
        states = self.states(residency)
        lives = self._gather_lives(residency), self._value_lives(states), self._hosted_lives(residency)
        return _profile_of(chain(*lives))

    def _gather_lives(self, residency: Residency) -> Iterator[Life]:
        count = len(self.decisions)
        for gather in self.moves.gathers.values():
            if gather.is_kept(residency):
                yield moment(gather.end, 0, count), moment(max(gather.end, gather.start), 0, count), gather.bytes

    def _hosted_lives(self, residency: Residency) -> Iterator[Life]:
        hosting = self.packed.packing.hosting
        for index in self.open:
            lives = hosting.copies if index in residency.hosted else hosting.away
            yield from lives(index, self.choice[index])

    @cached_property
    def open(self) -> tuple[int, ...]:
        """The parameters that may be put on the host, or not."""
        return self.packed.packing.hosting.open(self.pins)

    def _value_lives(self, states: Mapping[int, State]) -> Iterator[Life]:
        for index, pieces in self._pieces.items():
            for piece in pieces:
                if states[index] in piece.states:
                    yield piece.start, piece.end, self.held_in(index, piece)

    @cached_property
    def _pieces(self) -> dict[int, list[Piece]]:
        count = len(self.decisions)
        return {it: self.packed.pieces(it, value, value.pieces(count)) for it, value in self.saved.values.items()}

    def states(self, residency: Residency) -> dict[int, State]:
        """The states that the emitted program has: what is not kept is there again right before its first reader."""
        states: dict[int, State] = {}
        for index in sorted(self.saved.values, reverse=True):
            value = self.saved.values[index]
            reading = [states[reader] for reader in value.readers]
            times = [state for state in reading if isinstance(state, int)] + list(value.starts[-1:] * value.direct)
            if not times:
                states[index] = FREE
            elif index in residency.recomputed:
                states[index] = value.nearest(min(times))
            elif index in residency.words:
                states[index] = Packed(residency.words[index], value.nearest(min(times)))
            else:
                states[index] = KEEP
        return states

    def residency(self, picks: Sequence[int], states: Sequence[tuple[State, ...]]) -> Residency:
        """What a choice of the problem, whose first nodes are the saved values and then the gathers, stands for."""
        picked = [options[pick] for options, pick in zip(states, picks, strict=False)]
        count = len(self.saved.values)
        recomputed = {index for index, state in zip(self.saved.values, picked, strict=False) if isinstance(state, int)}
        pairs = zip(self.saved.values, picked, strict=False)
        packed = frozenset((index, state.word) for index, state in pairs if isinstance(state, Packed))
        gathers, parameters = picked[count : count + len(self.moves.gathers)], picked[count + len(self.moves.gathers) :]
        kept = {index for index, state in zip(self.moves.gathers, gathers, strict=True) if state == KEEP}
        hosted = {index for index, state in zip(self.open, parameters, strict=True) if state == ON_HOST}
        own = Residency(self.saved.closed(recomputed), packed=packed, hosted=self.given | hosted)
        return with_gathers(own, self.moves.gathers, kept)

    @cached_property
    def given(self) -> frozenset[int]:
        """The parameters that lie on the host in any case."""
        return self.packed.packing.hosting.given(self.pins)

    def picks(self, residency: Residency, states: Sequence[tuple[State, ...]], nodes: int) -> tuple[int, ...] | None:
        """A residency as a choice of the problem of so many nodes; None where the problem does not have it."""
        own = self.states(residency)
        wanted = [own[index] for index in self.saved.values]
        wanted += [KEEP if gather.is_kept(residency) else FREE for gather in self.moves.gathers.values()]
        wanted += [ON_HOST if index in residency.hosted else KEEP for index in self.open]
        if any(state not in options for state, options in zip(wanted, states, strict=True)):
            return None
        picks = [options.index(state) for state, options in zip(wanted, states, strict=True)]
        for (index, value), options in zip(self.saved.values.items(), states, strict=False):
            picks += [int(own[index] in piece.states) for piece in self.pieces(index, value, options)]
        for index in self.open:
            on_host = index in residency.hosted
            picks += [int(is_copy == on_host) for is_copy, _ in self.lives_of_parameter(index)]
        return (*picks, *[0] * (nodes - len(picks)))

    def pieces(self, index: int, value: SavedValue, options: tuple[State, ...]) -> list[Piece]:
        """The intervals in which some state holds the value; each has a node, after those of the values."""
        if not self.bytes[index]:
            return []
        return [piece for piece in self._pieces[index] if not piece.states.isdisjoint(options)]

    def lives_of_parameter(self, index: int) -> list[tuple[bool, Life]]:
        """What a parameter holds on the device: (whether it does so from the host, when and how much)."""
        hosting, pick = self.packed.packing.hosting, self.choice[index]
        lives = [(False, life) for life in hosting.away(index, pick)]
        return [item for item in [*lives, *((True, life) for life in hosting.copies(index, pick))] if item[1][2]]

    def held_in(self, index: int, piece: Piece) -> float:
        """Bytes that a value holds in one of its pieces."""
        pick = self.choice[index]
        return float(self.packed.bytes(index, piece.packed, pick) if piece.packed else self.bytes[index])

    def seconds_on_host(self, index: int) -> float:
        """What it costs to have a parameter on the host."""
        return self.packed.packing.hosting.seconds(index, self.choice[index])

    def seconds_in(self, index: int, state: State) -> float:
        """What a state of a saved value costs."""
        if isinstance(state, Packed):
            return self.packed.seconds(index, state.word, self.choice[index])
        return self.seconds[index] if isinstance(state, int) else 0.0

    def options(self, index: int) -> tuple[State, ...]:
        """The states among which the problem chooses for a saved value."""
        pin = self.pins.get(index)
        return states_of(self.saved.values[index], pin, self.packed.states(index, pin))

    def problem(self, constant: Array, limit: float | None) -> tuple[Problem, list[tuple[State, ...]]]:
        """The problem under a limit in bytes, and each node's states.

        `constant`: what else is held, [decision, 2]: while values are recomputed for a decision, and while it runs.
        """
        return _Builder(self).build(constant, limit)


def _profile_of(lives: Iterable[Life]) -> tuple[npt.NDArray[np.int64], Array]:
    """The moments at which what is alive changes, and the bytes before the first and after each of them."""
    found = np.array(list(lives), dtype=np.float64).reshape(-1, 3)
    ends = np.concatenate([found[:, 0], found[:, 1]]).astype(np.int64)
    times, places = np.unique(ends, return_inverse=True)
    changes = np.bincount(places, np.concatenate([found[:, 2], -found[:, 2]]), len(times))
    return times, np.concatenate([[0.0], np.cumsum(changes)])


class _Builder:
    def __init__(self, recomputation: Recomputation) -> None:
        self.of, self.count = recomputation, len(recomputation.decisions)
        self.costs: list[Array] = []
        self.usages: list[Array] = []
        self.intervals: list[tuple[int, int]] = []
        self.edges: list[tuple[int, int]] = []
        self.edge_costs: list[Array] = []

    def build(self, constant: Array, limit: float | None) -> tuple[Problem, list[tuple[State, ...]]]:
        values = self.of.saved.values
        states = [self.of.options(index) for index in values]
        place = {index: node for node, index in enumerate(values)}
        for index, options in zip(values, states, strict=True):
            seconds = np.array([self.of.seconds_in(index, state) for state in options])
            self._add(seconds, np.zeros(len(options)), (0, 0))
        for key, gather in self.of.moves.gathers.items():
            states.append(self._add_gather(gather, self.of.pins.get(key)))
            if gather.root in place:
                self._tie(place[gather.root], states[place[gather.root]], gather.root, states[-1])
        first = len(self.costs)
        for index in self.of.open:
            states.append((KEEP, ON_HOST))
            self._add(np.array([0.0, self.of.seconds_on_host(index)]), np.zeros(2), (0, 0))
        for node, (index, value) in enumerate(values.items()):
            for reader in value.readers:
                matrix = self._edge(index, reader, states[node], states[place[reader]])
                if matrix.any():
                    self._link(node, place[reader], matrix)
            self._add_pieces(node, value, states[node])
        for node, index in enumerate(self.of.open, first):
            self._add_lives(node, index)
        shift = max(0.0, -float(constant.min(initial=0.0)))
        self._add_constant(constant + shift)
        limit = None if limit is None else limit + shift
        problem = Problem(
            tuple(self.costs),
            tuple(self.usages),
            tuple(self.intervals),
            tuple(self.edges),
            tuple(self.edge_costs),
            limit,
        )
        return problem, states

    def _add(self, costs: Array, usages: Array, interval: tuple[int, int]) -> int:
        self.costs.append(costs)
        self.usages.append(usages)
        self.intervals.append(interval)
        return len(self.costs) - 1

    def _link(self, first: int, second: int, matrix: Array) -> None:
        self.edges.append((first, second))
        self.edge_costs.append(matrix)

    def _add_gather(self, gather: Gather, pin: str | None) -> tuple[State, ...]:
        """A copy that is kept costs nothing in the backward."""
        seconds, bytes_ = np.array([gather.seconds, 0.0]), np.array([0.0, float(gather.bytes)])
        states: dict[str | None, tuple[State, ...]] = {"keep": (KEEP,), "recompute": (FREE,)}
        options = states.get(pin, (FREE, KEEP))
        picked = [(FREE, KEEP).index(state) for state in options]
        self._add(seconds[picked], bytes_[picked], self._interval(gather))
        return options

    def _tie(self, node: int, sources: tuple[State, ...], root: int, gathers: tuple[State, ...]) -> None:
        """What is gathered again has to be there whole; of a recomputed value no copy is kept."""
        matrix = np.zeros((len(sources), len(gathers)))
        for row, state in enumerate(sources):
            for column, gather in enumerate(gathers):
                is_kept = gather == KEEP
                if (is_kept and isinstance(state, int)) or not (is_kept or self._will_do(root, state, 0)):
                    matrix[row, column] = float(FORBIDDEN)
        if matrix.any():
            self._link(node, len(self.costs) - 1, matrix)

    def _interval(self, gather: Gather) -> tuple[int, int]:
        return moment(gather.end, 0, self.count), moment(max(gather.end, gather.start), 0, self.count)

    def _edge(self, source: int, reader: int, sources: tuple[State, ...], readers: tuple[State, ...]) -> Array:
        kept, again = self.of.moves.between(source, reader)
        matrix = np.zeros((len(sources), len(readers)))
        for row, state in enumerate(sources):
            for column, reading in enumerate(readers):
                there = is_there(state, reading, passing=self.of.saved.values[source].passing)
                if not there or not self._will_do(source, state, reading):
                    matrix[row, column] = float(FORBIDDEN)
                elif isinstance(reading, int):
                    matrix[row, column] = again if isinstance(state, int) else kept
        return matrix

    def _will_do(self, source: int, state: State, reading: State) -> bool:
        """Whether what is held of a source is enough for what is recomputed from it."""
        if not isinstance(state, Packed) or not isinstance(reading, int):
            return True
        return self.of.packed.forms.is_whole(source, state.word)

    def _add_pieces(self, node: int, value: SavedValue, options: tuple[State, ...]) -> None:
        """A follower per interval, which holds the value or does not."""
        for piece in self.of.pieces(value.decision, value, options):
            bytes_ = self.of.held_in(value.decision, piece)
            held = np.array([state in piece.states for state in options])
            follower = self._add(np.zeros(2), np.array([0.0, bytes_]), (piece.start, piece.end))
            pairs = np.stack([np.where(held, float(FORBIDDEN), 0.0), np.where(held, 0.0, float(FORBIDDEN))], axis=1)
            self._link(node, follower, pairs)

    def _add_lives(self, node: int, index: int) -> None:
        """A follower for each time that a parameter is on the device, in one of its two states."""
        for is_copy, (start, end, bytes_) in self.of.lives_of_parameter(index):
            follower = self._add(np.zeros(2), np.array([0.0, bytes_]), (start, end))
            held = np.array([not is_copy, is_copy])
            pairs = np.stack([np.where(held, float(FORBIDDEN), 0.0), np.where(held, 0.0, float(FORBIDDEN))], axis=1)
            self._link(node, follower, pairs)

    def _add_constant(self, constant: Array) -> None:
        """What else is held: the most between two times at which the saved values change."""
        times = sorted(
            {time for interval in self.intervals for time in interval} | {0, moment(self.count, 0, self.count)}
        )
        flat = constant.reshape(-1)
        for start, end in pairwise(times):
            most = float(flat[self._slot(start) : self._slot(end - 1) + 1].max())
            if most > 0:
                self._add(np.zeros(1), np.array([most]), (start, end))

    def _slot(self, at: int) -> int:
        """Where a moment stands in the flat `constant`."""
        time, step = divmod(at, self.count + 1)
        return 2 * time + (step == self.count)
