"""Strategies that cannot fit: next to the least that all other nodes use, they are over capacity on their own."""

from __future__ import annotations

import numpy as np

from autopar.search.network import Array, Loads, Network, greatest_amounts


class RangeMinimum:
    """The least of values[low:high], for many ranges at once: a sparse table (Bender and Farach-Colton 2000)."""

    def __init__(self, values: Array) -> None:
        self.levels = [values]  # level k: minima of the runs of 2**k values
        while 2 ** len(self.levels) <= len(values):
            below, half = self.levels[-1], 2 ** (len(self.levels) - 1)
            self.levels.append(np.minimum(below[:-half], below[half:]))

    def of(self, low: Array, high: Array) -> Array:
        """One minimum per range; ranges are not empty."""
        level = np.frexp(high - low)[1] - 1  # floor of log2
        least = np.empty(len(low))
        for k in np.unique(level).tolist():
            at = level == k
            least[at] = np.minimum(self.levels[k][low[at]], self.levels[k][high[at] - 2**k])
        return least


def oversized(network: Network) -> dict[int, Array]:
    """Per node with one: mask of the strategies that are over some capacity by themselves.

    Requires settled loads: the least usages of all nodes are already off the capacities.
    """
    if not network.loads:
        return {}
    least = RangeMinimum(network.capacity)
    masks: dict[int, Array] = {}
    for node in _suspects(network, least):
        mask: Array = np.logical_or.reduce(_over(network, node, least)[1], axis=0)
        if mask.any():
            masks[node] = mask
    return masks


def _suspects(network: Network, least: RangeMinimum) -> list[int]:
    """The nodes whose greatest amounts, added up over all rows, pass the least capacity of their whole stretch."""
    nodes, loads = list(network.loads), list(network.loads.values())
    counts = np.array([len(load.first) for load in loads])
    starts = np.cumsum(counts) - counts
    totals = np.add.reduceat(greatest_amounts(loads), starts)
    low = np.minimum.reduceat(np.concatenate([load.first for load in loads]), starts)
    high = np.maximum.reduceat(np.concatenate([load.last for load in loads]), starts)
    return [nodes[at] for at in np.flatnonzero(totals > least.of(low, high)).tolist()]


def crowded_times(network: Network, node: int) -> Array:
    """The time points, in one stretch, at which strategies of a node are over capacity by themselves."""
    times, over = _over(network, node, RangeMinimum(network.capacity))
    stretches = np.flatnonzero(over.any(axis=1))
    crowded: Array = network.times[times[stretches[0]] : times[stretches[-1] + 1]]
    return crowded


def _over(network: Network, node: int, least: RangeMinimum) -> tuple[Array, Array]:
    """(times, whether a strategy is over capacity [intervals between them, strategies]) of one node."""
    times, totals = _totals(network.loads[node], network.amounts(node))
    return times, totals > least.of(times[:-1], times[1:])[:, None]


def _totals(load: Loads, amounts: Array) -> tuple[Array, Array]:
    """(times, usage [intervals between them, strategies]) of one node."""
    if len(load.first) == 1:
        return np.array([load.first[0], load.last[0]]), amounts
    times = np.unique(np.concatenate([load.first, load.last]))
    change = np.zeros((len(times), amounts.shape[1]))
    np.add.at(change, np.searchsorted(times, load.first), amounts)
    np.subtract.at(change, np.searchsorted(times, load.last), amounts)
    return times, np.cumsum(change, axis=0)[:-1]
