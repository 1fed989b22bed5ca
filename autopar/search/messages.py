"""Lower bounds and good choices of a priced network by sequential tree-reweighted message passing.

Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 28(10), 2006 (TRW-S), level by
level of a `Sweep`, so that one numpy call serves many nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.search.network import Array
from autopar.search.pricing import Pricing, ranges
from autopar.search.sweep import Sweep
from autopar.search.tables import Tables

_segment_min = np.minimum.reduceat


@dataclass(frozen=True, slots=True)
class _Send:
    """How the nodes of one level send messages along some arcs, away from the level."""

    entries: Array  # where the opposite messages on these arcs stand, one entry per strategy of the sender
    strategies: Array  # the sender's strategy of each entry, counted within the level
    pairs: Array  # per cell: its entry
    cells: Array  # costs, row by row over the receiver's strategies
    rows: Array  # where each row starts
    target: slice  # where the sent messages stand
    arcs: Array  # where each arc's sent message starts, within the target
    arc_of: Array  # per sent value: its arc


@dataclass(frozen=True, slots=True)
class _Decode:
    """How the nodes of one level look up what their earlier neighbours' positions cost them."""

    base: Array  # per entry of an incoming message: the cell for position 0 of the neighbour
    width: Array
    tail: Array


@dataclass(frozen=True, slots=True)
class _Level:
    places: Array
    span: slice  # of the level's strategies, in level order
    starts: Array  # per node: its first strategy within the level
    owner: Array  # per strategy: its node within the level
    weight: Array  # per strategy: TRW-S divides by the longer side of the node's arcs
    ahead: _Send  # to later levels
    back: _Send  # to earlier levels
    decode: _Decode


class Messages:
    """TRW-S over one network; messages persist, so that small changes of the prices cost few passes."""

    def __init__(self, pricing: Pricing, tables: Tables, sweep: Sweep) -> None:
        self.offset, self.count = pricing.offset, len(pricing.nodes)
        sizes = pricing.sizes
        self.cells = tables.cells
        self.order = ranges(pricing.bounds[sweep.places], sizes[sweep.places])  # flat strategies in level order
        self.level_starts = np.cumsum(sizes[sweep.places]) - sizes[sweep.places]
        self.level_owner = np.repeat(np.arange(self.count), sizes[sweep.places])
        layout = _Layout(pricing, tables, sweep)
        self.ahead = np.zeros(layout.ahead_size)  # messages to later nodes, over the receiver's strategies
        self.back = np.zeros(layout.back_size)
        self.levels = [layout.level(index) for index in range(sweep.depth)]

    def state(self) -> tuple[Array, Array]:
        """The messages, to come back to."""
        return self.ahead.copy(), self.back.copy()

    def restore(self, state: tuple[Array, Array]) -> None:
        """Come back to earlier messages."""
        self.ahead, self.back = state[0].copy(), state[1].copy()

    def forward(self, flat: Array) -> None:
        """One pass in order, under these (flat) node costs."""
        costs = flat[self.order]
        for level in self.levels:
            if len(level.ahead.entries):
                belief = self._belief(level, costs) * level.weight
                self.ahead[level.ahead.target] = _sent(level.ahead, belief, self.back)

    def backward(self, flat: Array) -> float:
        """One pass in reverse; returns a lower bound on the least total cost, offset included."""
        costs, bound = flat[self.order], self.offset
        for level in reversed(self.levels):
            belief = self._belief(level, costs)
            least = _segment_min(belief, level.starts)
            bound += float(least.sum())
            send = level.back
            if len(send.entries):
                belief = (belief - least[level.owner]) * level.weight
                sent = _sent(send, belief, self.ahead)
                least = _segment_min(sent, send.arcs)
                bound += float(least.sum())
                self.back[send.target] = sent - least[send.arc_of]
        return bound

    def choose(self, flat: Array) -> Array:
        """Positions per place: level by level, each the best given the earlier ones and what the later ones say."""
        costs, positions = flat[self.order], np.zeros(self.count, dtype=np.int64)
        cells = self.cells
        for level in self.levels:
            count, decode = len(level.owner), level.decode
            total = costs[level.span] + np.bincount(level.ahead.strategies, self.back[level.ahead.entries], count)
            given = cells[decode.base + positions[decode.tail] * decode.width]
            total += np.bincount(level.back.strategies, given, count)
            positions[level.places] = segment_argmin(total, level.starts, level.owner)
        return positions

    def beliefs(self, flat: Array) -> Array:
        """Per strategy (flat): node cost plus all messages, above the least one of the node."""
        costs = flat[self.order]
        total = np.empty(len(costs))
        for level in self.levels:
            total[level.span] = self._belief(level, costs)
        total -= _segment_min(total, self.level_starts)[self.level_owner]
        beliefs = np.empty(len(costs))
        beliefs[self.order] = total
        return beliefs

    def _belief(self, level: _Level, costs: Array) -> Array:
        count = len(level.owner)
        belief: Array = costs[level.span] + np.bincount(level.ahead.strategies, self.back[level.ahead.entries], count)
        belief += np.bincount(level.back.strategies, self.ahead[level.back.entries], count)
        return belief


def _sent(send: _Send, belief: Array, opposite: Array) -> Array:
    """Per arc and strategy of the receiver: the least of the sender's belief, less the opposite message, plus cost."""
    values = belief[send.strategies] - opposite[send.entries]
    pairs = values[send.pairs]
    pairs += send.cells
    sent: Array = _segment_min(pairs, send.rows)
    return sent


def segment_argmin(values: Array, starts: Array, owner: Array) -> Array:
    """Per segment: the first position of its least value, counted from the segment's start."""
    least = np.minimum.reduceat(values, starts)
    at = np.flatnonzero(values == least[owner])[::-1]
    positions = np.zeros(len(starts), dtype=np.int64)
    positions[owner[at]] = at  # the last one written is the first one in the segment
    return positions - starts


class _Layout:
    """Where everything stands; only needed while the levels are made."""

    def __init__(self, pricing: Pricing, tables: Tables, sweep: Sweep) -> None:
        self.pricing, self.tables, self.sweep = pricing, tables, sweep
        self.incoming = sweep.arcs  # by the level of the head
        tail_level = sweep.level[tables.tail[sweep.arcs]]
        turns = sweep.turn[tables.head[sweep.arcs]], sweep.turn[tables.tail[sweep.arcs]]
        self.outgoing = sweep.arcs[np.lexsort((*turns, tail_level))]  # by the level of the tail
        self.outgoing_bounds = np.searchsorted(sweep.level[tables.tail[self.outgoing]], np.arange(sweep.depth + 1))
        heads, tails = tables.width[self.outgoing], tables.width[tables.back(self.incoming)]
        self.ahead_start = _scattered(self.outgoing, heads, len(tables.tail))
        self.back_start = _scattered(self.incoming, tails, len(tables.tail))
        self.ahead_size, self.back_size = int(heads.sum()), int(tails.sum())
        arc_count = np.bincount(tables.tail[sweep.arcs], minlength=len(pricing.nodes))
        head_count = np.bincount(tables.head[sweep.arcs], minlength=len(pricing.nodes))
        self.weight = 1.0 / np.maximum(1, np.maximum(arc_count, head_count))

    def level(self, index: int) -> _Level:
        pricing, sweep, tables = self.pricing, self.sweep, self.tables
        places = sweep.places[sweep.bounds[index] : sweep.bounds[index + 1]]
        sizes = pricing.sizes[places]
        starts = np.cumsum(sizes) - sizes
        owner = np.repeat(np.arange(len(places)), sizes)
        before = int(pricing.sizes[sweep.places[: sweep.bounds[index]]].sum())
        out = self.outgoing[self.outgoing_bounds[index] : self.outgoing_bounds[index + 1]]
        inn = self.incoming[sweep.arc_bounds[index] : sweep.arc_bounds[index + 1]]
        width = tables.width[inn]
        return _Level(
            places=places,
            span=slice(before, before + len(owner)),
            starts=starts,
            owner=owner,
            weight=self.weight[places][owner],
            ahead=self._send(out, tables.back(out), starts, self.back_start, self.ahead_start),
            back=self._send(inn, inn, starts, self.ahead_start, self.back_start),
            decode=_Decode(
                base=ranges(tables.base[inn], width),
                width=np.repeat(width, width),
                tail=np.repeat(tables.tail[inn], width),
            ),
        )

    def _send(self, arcs: Array, toward: Array, starts: Array, opposite: Array, target: Array) -> _Send:
        """`toward`: the same arcs from the receiver to the sender, whose tables have the receiver's rows."""
        tables = self.tables
        width, rows = tables.width[toward], tables.width[tables.back(toward)]
        row_width = np.repeat(width, rows)
        first = int(target[arcs[0]]) if len(arcs) else 0
        return _Send(
            entries=ranges(opposite[arcs], width),
            strategies=ranges(starts[self.sweep.slot[tables.head[toward]]], width),
            pairs=ranges(np.repeat(np.cumsum(width) - width, rows), row_width),
            cells=tables.cells[ranges(tables.base[toward], tables.area[toward])],
            rows=np.cumsum(row_width) - row_width,
            target=slice(first, first + int(rows.sum())),
            arcs=np.cumsum(rows) - rows,
            arc_of=np.repeat(np.arange(len(arcs)), rows),
        )


def _scattered(arcs: Array, widths: Array, count: int) -> Array:
    """Per arc: where its values start when the arcs stand in this order."""
    starts = np.zeros(count, dtype=np.int64)
    starts[arcs] = np.cumsum(widths) - widths
    return starts
