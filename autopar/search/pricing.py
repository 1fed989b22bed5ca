"""Node costs and usage of a network as flat arrays: prices in, priced node costs out; choices in, usage out."""

from __future__ import annotations

import numpy as np
from scipy import sparse

from autopar.search.network import Array, Network, sums_over_time


class Pricing:
    """The alive nodes in ascending order ("places"), their strategies one after the other, and what they use.

    A value per strategy is flat: the strategies of place p stand at bounds[p]:bounds[p + 1]. Holds no reference to the
    network, so it can be handed to another process.
    """

    def __init__(self, network: Network) -> None:
        self.nodes = network.nodes()
        self.place = {node: index for index, node in enumerate(self.nodes)}
        self.sizes = np.array([network.size(node) for node in self.nodes], dtype=np.int64)
        self.bounds = np.concatenate([[0], np.cumsum(self.sizes)])
        self.offset = network.offset
        self.capacity = network.capacity
        unary = [network.unary[node] for node in self.nodes]
        self.unary = np.concatenate(unary) if unary else np.zeros(0)
        loaded = [(place, node) for place, node in enumerate(self.nodes) if node in network.loads]
        loads = [network.loads[node] for _, node in loaded]
        rows = [len(load.first) for load in loads]
        self.first = _joined([load.first for load in loads])  # per row: used over the time points [first, last)
        self.last = _joined([load.last for load in loads])
        self.row_place = np.repeat(np.array([place for place, _ in loaded], dtype=np.int64), rows)
        amounts = [network.amounts(node).reshape(-1) for _, node in loaded]
        self.amounts = np.concatenate(amounts) if amounts else np.zeros(0)  # [strategies of the row's node], row by row
        widths = self.sizes[self.row_place]
        self.row_base = np.concatenate([[0], np.cumsum(widths)])
        self.place_rows = np.concatenate([[0], np.cumsum(np.bincount(self.row_place, minlength=len(self.nodes)))])
        strategies = ranges(self.bounds[self.row_place], widths)
        shape = (len(self.unary), len(self.first))
        self.by_strategy = sparse.csc_matrix((self.amounts, strategies, self.row_base), shape=shape)

    def priced(self, prices: Array) -> Array:
        """Node costs plus usage at `prices` (quanta per unit of usage, per time point), flat."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        costs: Array = self.unary + self.by_strategy @ (total[self.last] - total[self.first])
        return costs

    def split(self, flat: Array) -> list[Array]:
        """A flat array, per place."""
        return np.split(flat, self.bounds[1:-1]) if self.nodes else []

    def usage(self, positions: Array) -> Array:
        """Usage at every time point for one position per place."""
        picked = self.amounts[self.row_base[:-1] + positions[self.row_place]]
        return self.profile(self.first, self.last, picked)

    def profile(self, first: Array, last: Array, amounts: Array) -> Array:
        """What rows that use `amounts` over [first, last) add up to at every time point."""
        return sums_over_time(first, last, amounts, len(self.capacity))


def ranges(starts: Array, lengths: Array) -> Array:
    """The numbers start, start + 1, ... of each range, one range after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - ends + lengths, lengths) + np.arange(total)


def _joined(parts: list[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
