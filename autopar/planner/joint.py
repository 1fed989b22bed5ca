"""Layouts and residency as one search problem: an op's strategy says how it is sharded and whether it is recomputed.

Each saved value has its strategies times {keep, recompute, the forms in which it may be packed} (and free, where only
recomputation reads it), each parameter its strategies times {keep, on the host}. The edges carry both prices: of moving
a value in the forward, and of moving it again for what is recomputed from it; a pair in which a value is recomputed
from one that is free is forbidden. Followers hold the value in the gap between the phases, and from its first reader in
the backward on, and of what is on the host its copies on the device. Layers of one kind share both decisions here;
`Fit` then lets every layer keep or recompute for itself under the layouts that were found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from autopar.passes.packings import PACKED
from autopar.planner.build import PlanningProblem
from autopar.planner.packed_values import PackedValues, Packing
from autopar.planner.recomputation import is_there, states_of
from autopar.planner.residency import Residency
from autopar.planner.saved_values import (
    KEEP,
    ON_HOST,
    Packed,
    Piece,
    SavedValue,
    SavedValues,
    State,
    is_view,
    late_decisions,
    moment,
    roots_of,
)
from autopar.search import FORBIDDEN, Problem
from autopar.sharding.layout import Layout, shard_dim

Matrix = npt.NDArray[np.float64]
MAX_PAIRS = 3_000_000  # of strategies on the edges between different classes: more is not worth the time


@dataclass(frozen=True)
class Joint:
    """The problem, and per decision the states that multiply its strategies: label = strategy * states + state."""

    problem: Problem
    states: tuple[tuple[State, ...], ...]
    saved: SavedValues
    parameters: tuple[int, ...] = ()  # those that may be put on the host, or not
    given: frozenset[int] = frozenset()  # those that lie there in any case

    def choice(self, picks: tuple[int, ...]) -> tuple[int, ...]:
        """The strategies of the decisions under a choice of the problem."""
        return tuple(pick // len(states) for pick, states in zip(picks, self.states, strict=False))

    def residency(self, picks: tuple[int, ...]) -> Residency:
        """What becomes of the saved values under a choice of the problem; parameters are gathered again."""
        picked = {index: self.states[index][picks[index] % len(self.states[index])] for index in self.saved.values}
        again = {index for index, state in picked.items() if isinstance(state, int)}
        packed = frozenset((index, state.word) for index, state in picked.items() if isinstance(state, Packed))
        states = ((index, self.states[index][picks[index] % len(self.states[index])]) for index in self.parameters)
        hosted = self.given | {index for index, state in states if state == ON_HOST}
        return Residency(self.saved.closed(again), packed=packed, hosted=hosted)


def joint_problem(planning: PlanningProblem, pins: Mapping[int, str], packing: Packing, limit: float) -> Joint | None:
    """The joint problem under a limit in bytes; None where it would be too large (see MAX_PAIRS)."""
    saved = SavedValues(planning.decisions, 0, frozenset(pins))
    packed = PackedValues(saved, packing, frozenset(pins.values()) & {*PACKED})
    return _Builder(planning, pins, packed).build(limit)


class _Builder:
    def __init__(self, planning: PlanningProblem, pins: Mapping[int, str], packed: PackedValues) -> None:
        self.planning, self.base = planning, planning.problem
        self.packed, self.saved = packed, packed.saved.values
        self.roots, self.count = roots_of(planning.decisions), len(planning.decisions)
        self.hosting, self.given = packed.packing.hosting, packed.packing.hosting.given(pins)
        self.open = packed.packing.hosting.open(pins)
        self.states = tuple(self._states(index, pins.get(index)) for index in range(self.count))
        self.costs: list[Matrix] = []
        self.usages: list[Matrix] = []
        self.intervals: list[tuple[int, int]] = []
        self.edges: list[tuple[int, int]] = []
        self.edge_costs: list[Matrix] = []
        self.groups: list[object] = []
        self.known: dict[object, Matrix] = {}  # what repeated layers share

    def _states(self, index: int, pin: str | None) -> tuple[State, ...]:
        """What may become of a value; where a parameter may lie, and its gradient, which goes where it lies."""
        if index in self.saved:
            return states_of(self.saved[index], pin, self._packed_states(index, pin))
        decision = self.planning.decisions[index]
        parameter = self._parameters.get(decision.name, -1) if decision.kind in ("parameter", "gradient") else -1
        return (ON_HOST,) if parameter in self.given else (KEEP, ON_HOST) if parameter in self.open else (KEEP,)

    @cached_property
    def _parameters(self) -> dict[str, int]:
        return {item.name: index for index, item in enumerate(self.planning.decisions) if item.kind == "parameter"}

    def _packed_states(self, index: int, pin: str | None) -> tuple[Packed, ...]:
        """Unless it is pinned, only what costs next to nothing: the rest is for `Fit`."""
        states = self.packed.states(index, pin)
        return tuple(it for it in states if pin or it.word != "offload" or self._classes[index] in self._hidden)

    @cached_property
    def viewed(self) -> set[int]:
        """The views of the forward that the backward reads: a copy that is gathered for one is gathered again."""
        decisions, late = self.planning.decisions, late_decisions(self.planning.decisions)
        found: set[int] = set()
        for index in range(self.count - 1, -1, -1):
            if late[index] or index in found:
                found |= {source.decision for source in decisions[index].sources if is_view(decisions[source.decision])}
        return {index for index in found if not late[index]}

    @cached_property
    def _hidden(self) -> set[int]:
        """The classes whose members' copies to the host are all hidden."""
        classes, hidden = self._classes, self.packed.packing.link.hidden
        return {classes[index] for index in hidden} - {classes[index] for index in self.saved.keys() - hidden}

    @property
    def _classes(self) -> tuple[int, ...]:
        """By decision: its class, of which every problem of a planner has one."""
        assert self.base.groups is not None
        return self.base.groups

    def build(self, limit: float) -> Joint | None:
        if self._pairs() > MAX_PAIRS:
            return None
        for index in range(len(self.planning.decisions)):
            self._add_decision(index)
        for edge, (first, second) in enumerate(self.base.edges):
            self._link(first, second, self._edge(edge, first, second))
            self._add_presence(edge, first, second)
        for index, value in self.saved.items():
            self._add_pieces(index, value)
        for index in (*self.open, *sorted(self.given)):
            self._add_copies(index)
        numbers: dict[object, int] = {}
        problem = Problem(
            tuple(self.costs), tuple(self.usages), tuple(self.intervals), tuple(self.edges), tuple(self.edge_costs),
            limit, tuple(numbers.setdefault(group, len(numbers)) for group in self.groups),
        )  # fmt: skip
        return Joint(problem, self.states, self.packed.saved, self.open, self.given)

    def _pairs(self) -> int:
        groups = self.base.groups
        assert groups is not None
        found = {}
        for matrix, (first, second) in zip(self.base.edge_costs, self.base.edges, strict=True):
            sizes = len(self.states[first]), len(self.states[second])
            found[groups[first], groups[second], sizes] = matrix.size * sizes[0] * sizes[1]
        return sum(found.values())

    def _once(self, key: object, make: Callable[[], Matrix]) -> Matrix:
        """One and the same array for equal keys."""
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def _kinds(self, index: int) -> tuple[str, ...]:
        """The states, whenever they recompute: what members of a class must share."""
        return tuple(
            "recompute" if isinstance(state, int) else state.word if isinstance(state, Packed) else state
            for state in self.states[index]
        )

    def _add_decision(self, index: int) -> None:
        value, states, costs = self.saved.get(index), self.states[index], self.base.costs[index]
        low, high = self.base.intervals[index]
        usages, kinds = self.base.usages[index], self._kinds(index)
        assert self.base.groups is not None
        key = "costs", id(costs), id(self.planning.decisions[index].seconds), *self._alike(index)
        self.costs.append(self._once(key, lambda: self._costs(index)))
        on_device = np.array([state != ON_HOST for state in states], dtype=np.float64)
        key = "usages", id(usages), tuple(on_device)
        self.usages.append(self._once(key, lambda: _products(usages, on_device)))
        end = moment(high, 0, self.count) if value is None else value.forward_end
        self.intervals.append((moment(low, 0, self.count), end))
        self.groups.append((self.base.groups[index], kinds))

    def _alike(self, index: int) -> tuple[object, ...]:
        """What the packed forms of two values that are alike have in common."""
        value, decision = self.saved.get(index), self.planning.decisions[index]
        if value is None:
            is_hosted = decision.kind == "parameter" and ON_HOST in self.states[index]
            return self._kinds(index), self.hosting.hidden_s(index) if is_hosted else ()
        hidden = bool(self.packed.packing.words) and index in self.packed.packing.link.hidden
        return self._kinds(index), value.outputs, value.is_read_forward, hidden, id(decision.strategies)

    def _costs(self, index: int) -> Matrix:
        """Seconds by strategy and state."""
        value, states, costs = self.saved.get(index), self.states[index], self.base.costs[index]
        again = np.array([isinstance(state, int) for state in states], dtype=np.float64)
        if value is not None and not value.is_read_forward:
            again *= 0.0
        seconds = np.where(costs < FORBIDDEN, self.planning.decisions[index].seconds, 0.0)
        total: Matrix = costs[:, None] + seconds[:, None] * again[None, :]
        for place, state in enumerate(states):
            if state == ON_HOST and self.planning.decisions[index].kind == "parameter":
                total[:, place] += [self.hosting.seconds(index, pick) for pick in range(len(costs))]
            if isinstance(state, Packed):
                total[:, place] += [self.packed.seconds(index, state.word, pick) for pick in range(len(costs))]
        return total.reshape(-1)

    def _link(self, first: int, second: int, matrix: Matrix) -> None:
        self.edges.append((first, second))
        self.edge_costs.append(matrix)

    def _edge(self, edge: int, first: int, second: int) -> Matrix:
        """The move in the forward, and again for a reader that is recomputed."""
        base, argument = self.base.edge_costs[edge], self.planning.edge_arguments[edge]
        held = first in self.saved, second in self.viewed
        key = "edge", id(base), self._kinds(first), self._kinds(second), argument, held
        return self._once(key, lambda: self._repeated(base, argument, first, second))

    def _repeated(self, base: Matrix, argument: int, first: int, second: int) -> Matrix:
        sources, readers = self.states[first], self.states[second]
        total = np.repeat(np.repeat(base, len(sources), axis=0), len(readers), axis=1).reshape(
            len(base), len(sources), base.shape[1], len(readers)
        )
        recomputed = [place for place, state in enumerate(readers) if isinstance(state, int)]
        if recomputed and argument >= 0:
            kept = np.where(self._moves_once(first, second, argument), 0.0, base)
            for place, state in enumerate(sources):
                is_held = state == KEEP or isinstance(state, Packed)
                repeated = kept if is_held and not is_view(self.planning.decisions[first]) else base
                total[:, place, :, recomputed] += np.where(base < FORBIDDEN, repeated, 0.0)
        if argument < 0 and len(sources) == len(readers) > 1:  # a gradient goes where its parameter lies
            for place in range(len(sources)):
                total[:, place, :, [it for it in range(len(readers)) if it != place]] = float(FORBIDDEN)
        if second in self.viewed:
            total += np.where((base < FORBIDDEN) & ~self._moves_once(first, second, argument), base, 0.0)[
                :, None, :, None
            ]
        return total.reshape(base.shape[0] * len(sources), -1)

    def _moves_once(self, first: int, second: int, argument: int) -> npt.NDArray[np.bool_]:
        """`moves_once` of every pair of strategies: what the forward has moved so is kept as it was moved."""
        source = self.planning.decisions[second].sources[argument]
        producer, reader = self.planning.decisions[first], self.planning.decisions[second]
        before = np.array([self._ways(strategy.outputs[source.output]) for strategy in producer.strategies])
        after = np.array([self._ways(strategy.inputs[argument]) for strategy in reader.strategies])
        once: npt.NDArray[np.bool_] = after[None, :] >= before[:, None]
        return once if producer.kind == "op" else np.zeros_like(once)

    def _ways(self, layout: Layout) -> int:
        pairs = zip(layout, self.planning.mesh_shape, strict=True)
        return int(np.prod([ranks for placement, ranks in pairs if shard_dim(placement) is not None], initial=1))

    def _add_presence(self, edge: int, first: int, second: int) -> None:
        """Forbid recomputing a value whose source, under its views, is neither kept nor recomputed."""
        root = self.roots[first]
        sources, readers = self.states[root], self.states[second]
        if self.planning.edge_arguments[edge] < 0 or second not in self.saved:
            return
        absent = tuple(tuple(self._is_absent(root, it, reader) for reader in readers) for it in sources)
        if not any(map(any, absent)):
            return
        counts = len(self.base.costs[root]), len(self.base.costs[second])
        key = "absent", absent, counts
        forbidden = self._once(key, lambda: np.where(np.tile(np.array(absent), counts), float(FORBIDDEN), 0.0))
        if root == first:
            own = self.edge_costs[-1]
            self.edge_costs[-1] = self._once((key, id(own)), lambda: np.maximum(own, forbidden))
        else:
            self._link(root, second, forbidden)

    def _is_absent(self, root: int, state: State, reader: State) -> bool:
        if isinstance(state, Packed):
            return isinstance(reader, int) and not self.packed.forms.is_whole(root, state.word)
        return not is_there(0 if isinstance(state, int) else state, reader)

    def _add_copies(self, index: int) -> None:
        """What a parameter on the host holds on the device, in whatever layout it lies."""
        picks = range(len(self.planning.decisions[index].strategies))
        per_pick = [list(self.hosting.copies(index, pick)) for pick in picks]
        on_host = np.array([state == ON_HOST for state in self.states[index]], dtype=np.float64)
        for number, lives in enumerate(zip(*per_pick, strict=True)):
            bytes_ = np.array([life[2] for life in lives])
            key = "copy", tuple(bytes_.tolist()), len(on_host)
            amounts = self._once(key, partial(_products, bytes_, on_host))
            self._hold(index, lives[0][0], lives[0][1], ("copy", number), amounts, key)

    def _hold(self, index: int, start: int, end: int, name: object, amounts: Matrix, key: object) -> None:
        """A follower that holds, from `start` to `end`, as much as a decision's choice says."""
        levels = self._once((key, "levels"), lambda: np.unique([0.0, *amounts]))
        self.costs.append(self._once(("nothing", len(levels)), lambda: np.zeros(len(levels))))
        self.usages.append(levels)
        self.intervals.append((start, end))
        self.groups.append((self.groups[index], name, tuple(levels)))
        self._link(index, len(self.costs) - 1, self._once((key, "link"), lambda: _same(amounts, levels)))

    def _add_pieces(self, index: int, value: SavedValue) -> None:
        for number, piece in enumerate(self.packed.pieces(index, value, value.pieces(self.count))):
            self._add_piece(index, value, number, piece)

    def _add_piece(self, index: int, value: SavedValue, number: int, piece: Piece) -> None:
        active = np.array([state in piece.states for state in self.states[index]])
        alike = id(self.planning.decisions[index].bytes), *self._alike(index)
        key = "held", piece.packed, tuple(active.tolist()), *alike
        amounts = self._once(key, lambda: self._held(index, value, piece, active))
        if not amounts.any():
            return
        self._hold(index, piece.start, piece.end, ("held", number), amounts, key)

    def _held(self, index: int, value: SavedValue, piece: Piece, active: npt.NDArray[np.bool_]) -> Matrix:
        """Bytes that a value holds in one of its pieces, by strategy and state."""
        decision, shape = self.planning.decisions[index], self.planning.mesh_shape
        if not active.any():
            return np.zeros(len(decision.strategies) * len(active))
        packed, picks = piece.packed, range(len(decision.strategies))
        held = [
            self.packed.bytes(index, packed, pick) if packed else value.bytes(decision, pick, shape) for pick in picks
        ]
        amounts: Matrix = np.array(held, dtype=np.float64)[:, None] * active[None, :]
        return amounts.reshape(-1)


def _products(by_strategy: Matrix, by_state: Matrix) -> Matrix:
    return np.outer(by_strategy, by_state).reshape(-1)


def _same(amounts: Matrix, levels: Matrix) -> Matrix:
    """Forbids all levels but that of the amount."""
    return np.where(amounts[:, None] == levels[None, :], 0.0, float(FORBIDDEN))
