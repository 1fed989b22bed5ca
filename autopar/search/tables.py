"""All pair costs of a network in one flat array, readable along and against every edge."""

from __future__ import annotations

import numpy as np

from autopar.search.network import Array, Network
from autopar.search.pricing import Pricing, ranges


class Tables:
    """Every edge as two arcs: arc e from the earlier place to the later one, arc e + edges back.

    The table of an arc stands at cells[base[arc]:], row by row over the strategies of its tail. Forbidden pairs cost
    `forbidden`, which is more than all allowed costs can add up to, so that sums and differences stay finite.
    """

    def __init__(self, network: Network, pricing: Pricing) -> None:
        place, links = pricing.place, network.links
        edges = [
            (place[first], place[second], matrix)
            for first in pricing.nodes
            for second, matrix in links[first].items()
            if first < second
        ]
        first = np.array([edge[0] for edge in edges], dtype=np.int64)
        second = np.array([edge[1] for edge in edges], dtype=np.int64)
        parts = [edge[2].reshape(-1) for edge in edges] + [edge[2].T.reshape(-1) for edge in edges]
        cells = np.concatenate(parts) if parts else np.zeros(0)
        self.edges = len(edges)
        self.tail = np.concatenate([first, second])
        self.head = np.concatenate([second, first])
        self.width = pricing.sizes[self.head]  # of a row
        self.area = self.width * pricing.sizes[self.tail]
        self.base = np.cumsum(self.area) - self.area
        self.forbidden = _above_all_sums(pricing.unary, cells, self.base)
        self.cells = np.minimum(cells, self.forbidden)
        by_tail = np.argsort(self.tail, kind="stable")
        self.arcs = by_tail  # grouped by tail
        self.arcs_of = np.searchsorted(self.tail[by_tail], np.arange(len(pricing.nodes) + 1))
        self.head_start = pricing.bounds[self.head]

    def back(self, arcs: Array) -> Array:
        """The same edges in the other direction."""
        return np.where(arcs < self.edges, arcs + self.edges, arcs - self.edges)

    def leaving(self, places: Array) -> Array:
        """The arcs whose tail is one of the places."""
        return self.arcs[ranges(self.arcs_of[places], self.arcs_of[places + 1] - self.arcs_of[places])]

    def rows(self, arcs: Array, positions: Array) -> tuple[Array, Array]:
        """(flat strategies of the heads, their pair costs) with each tail at its position."""
        width = self.width[arcs]
        at = self.base[arcs] + positions[self.tail[arcs]] * width
        return ranges(self.head_start[arcs], width), self.cells[ranges(at, width)]

    def pair_costs(self, arcs: Array, positions: Array) -> Array:
        """The cost of each arc's pair of positions."""
        at = self.base[arcs] + positions[self.tail[arcs]] * self.width[arcs] + positions[self.head[arcs]]
        costs: Array = self.cells[at]
        return costs

    def cost(self, pricing: Pricing, positions: Array) -> float:
        """Cost of a choice in quanta, usage not priced; `forbidden` or more where it breaks a rule."""
        own = pricing.unary[pricing.bounds[:-1] + positions]
        pairs = self.pair_costs(np.arange(self.edges), positions)
        return float(pricing.offset + np.minimum(own, self.forbidden).sum() + pairs.sum())


def _above_all_sums(unary: Array, cells: Array, base: Array) -> float:
    """A power of two above four times what the allowed costs can add up to."""
    finite = np.where(cells < np.inf, np.abs(cells), 0.0)
    greatest = np.maximum.reduceat(finite, base).sum() if len(base) else 0.0
    total = float(greatest + np.abs(unary[unary < np.inf]).sum()) + 1.0
    return float(2.0 ** np.ceil(np.log2(4.0 * total)))
