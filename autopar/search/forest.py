"""The best positions of a random half of the nodes at once, given the rest: dynamic programming on random forests.

Hamze and de Freitas, "From fields to trees", UAI 2004: fix nodes until those left free form a forest, and treat the
forest exactly. What changes falls into clusters that do not touch each other, so each can be taken or left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.search.messages import segment_argmin
from autopar.search.network import Array
from autopar.search.pricing import Pricing, ranges
from autopar.search.sweep import Sweep
from autopar.search.tables import Tables


class State:
    """One choice, and what every strategy costs in pairs, given the other nodes' positions."""

    def __init__(self, pricing: Pricing, tables: Tables, positions: Array) -> None:
        self.pricing, self.tables = pricing, tables
        self.positions = positions.copy()
        self.usage = pricing.usage(self.positions)
        at, costs = tables.rows(np.arange(len(tables.tail)), self.positions)
        self.given = np.bincount(at, costs, len(pricing.unary))

    def cost(self) -> float:
        """Quanta, usage not priced; half of the table's `forbidden` or more where a pair is forbidden."""
        at = self.pricing.bounds[:-1] + self.positions
        return float(self.pricing.offset + (self.pricing.unary[at] + 0.5 * self.given[at]).sum())

    def move(self, places: Array, positions: Array, usage: Array) -> None:
        """Take new positions for some places; `usage` is the profile that they give."""
        arcs = self.tables.leaving(places)
        at, before = self.tables.rows(arcs, self.positions)
        self.positions[places] = positions
        self.usage = usage
        after = self.tables.rows(arcs, self.positions)[1]
        self.given += np.bincount(at, after - before, len(self.given))


@dataclass(frozen=True, slots=True)
class Proposal:
    """Changes in clusters that do not touch: their costs add up, so any subset of the clusters may be made."""

    places: Array
    positions: Array  # the new ones
    cluster: Array  # per place
    gain: Array  # per cluster: what it saves, in priced quanta


class Forests:
    """Random forests of one sweep's order: every free node has at most one free neighbour on an earlier level."""

    def __init__(self, pricing: Pricing, tables: Tables, sweep: Sweep) -> None:
        self.pricing, self.tables, self.sweep = pricing, tables, sweep
        heads, tails = tables.head[sweep.arcs], tables.tail[sweep.arcs]
        self.levels = [
            (
                sweep.places[sweep.bounds[index] : sweep.bounds[index + 1]],
                sweep.slot[heads[sweep.arc_bounds[index] : sweep.arc_bounds[index + 1]]],
                tails[sweep.arc_bounds[index] : sweep.arc_bounds[index + 1]],
            )
            for index in range(sweep.depth)
        ]

    def propose(self, state: State, unary: Array, wanted: Array) -> Proposal:
        """The best positions, under node costs `unary`, of a forest among the `wanted` places (a mask)."""
        free = self._grown(wanted)
        tree = _Trees(self, state, unary, free)
        tree.collect()
        positions = tree.decide()
        return tree.clusters(positions)

    def _grown(self, wanted: Array) -> Array:
        """Mask of the free places."""
        free = np.zeros(len(wanted), dtype=bool)
        for places, slots, tails in self.levels:
            earlier = np.bincount(slots, free[tails], len(places))
            free[places] = (earlier <= 1) & wanted[places]
        return free


class _Trees:
    """Dynamic programming over one forest: from the leaves (late levels) to the roots, and back."""

    def __init__(self, forests: Forests, state: State, unary: Array, free: Array) -> None:
        pricing, tables, sweep = forests.pricing, forests.tables, forests.sweep
        self.pricing, self.tables, self.state, self.free = pricing, tables, state, free
        inside = free[tables.tail[sweep.arcs]] & free[tables.head[sweep.arcs]]
        self.arcs = sweep.arcs[inside]  # parent to child, by the child's level
        counts = np.concatenate([[0], np.cumsum(inside)])
        self.bounds = counts[sweep.arc_bounds].tolist()
        self.parent, self.child = tables.tail[self.arcs], tables.head[self.arcs]
        self.parent_size, self.child_size = pricing.sizes[self.parent], tables.width[self.arcs]
        both = np.concatenate([self.arcs, tables.back(self.arcs)])
        at, costs = tables.rows(both, state.positions)
        self.own = unary + state.given - np.bincount(at, costs, len(unary))  # given what is fixed
        self.total = self.own.copy()  # and the best of the children
        self.area = tables.area[self.arcs]
        self.cells = tables.cells[ranges(tables.base[self.arcs], self.area)]
        self.cell_start = np.cumsum(self.area) - self.area

    def collect(self) -> None:
        """Add to every parent's strategies the least cost of its children below."""
        bounds = self.pricing.bounds
        width = np.repeat(self.child_size, self.parent_size)  # per row of a table
        child_at = ranges(np.repeat(bounds[self.child], self.parent_size), width)
        row_start = np.cumsum(width) - width
        parent_at = ranges(bounds[self.parent], self.parent_size)
        cell_bound = np.concatenate([[0], np.cumsum(self.area)])
        row_bound = np.concatenate([[0], np.cumsum(self.parent_size)])
        for low, high in reversed(list(zip(self.bounds[:-1], self.bounds[1:], strict=True))):
            if low == high:
                continue
            first, last = cell_bound[low], cell_bound[high]
            rows = slice(row_bound[low], row_bound[high])
            costs = self.total[child_at[first:last]] + self.cells[first:last]
            least = np.minimum.reduceat(costs, row_start[rows] - first)
            np.add.at(self.total, parent_at[rows], least)

    def decide(self) -> Array:
        """Positions of all places: roots first, then children given their parents."""
        pricing, positions = self.pricing, self.state.positions.copy()
        is_child = np.zeros(len(self.free), dtype=bool)
        is_child[self.child] = True
        roots = np.flatnonzero(self.free & ~is_child)
        sizes = pricing.sizes[roots]
        costs = self.total[ranges(pricing.bounds[roots], sizes)]
        positions[roots] = segment_argmin(costs, np.cumsum(sizes) - sizes, np.repeat(np.arange(len(roots)), sizes))
        size = self.child_size
        start = np.concatenate([[0], np.cumsum(size)])
        totals = self.total[ranges(pricing.bounds[self.child], size)]
        offsets = ranges(self.cell_start, size)
        arc_of = np.repeat(np.arange(len(size)), size)
        for low, high in zip(self.bounds[:-1], self.bounds[1:], strict=True):
            if low == high:
                continue
            span = slice(start[low], start[high])
            owner = arc_of[span] - low
            row = (positions[self.parent[low:high]] * size[low:high])[owner]
            costs = totals[span] + self.cells[offsets[span] + row]
            positions[self.child[low:high]] = segment_argmin(costs, start[low:high] - start[low], owner)
        return positions

    def clusters(self, positions: Array) -> Proposal:
        """What changed, grouped into pieces that are connected in the forest."""
        old, bounds = self.state.positions, self.pricing.bounds[:-1]
        changed = positions != old
        leader = np.arange(len(old))
        joined = changed[self.parent] & changed[self.child]
        leader[self.child[joined]] = self.parent[joined]
        while ((further := leader[leader]) != leader).any():
            leader = further
        places = np.flatnonzero(changed)
        saved = np.bincount(leader[places], (self.own[bounds + old] - self.own[bounds + positions])[places], len(old))
        touched = changed[self.parent] | changed[self.child]
        arcs = self.arcs[touched]
        parent, child = self.parent[touched], self.child[touched]
        pairs = self.tables.pair_costs(arcs, old) - self.tables.pair_costs(arcs, positions)
        saved += np.bincount(leader[np.where(changed[parent], parent, child)], pairs, len(old))
        names, cluster = np.unique(leader[places], return_inverse=True)
        return Proposal(places, positions[places], cluster, saved[names])
