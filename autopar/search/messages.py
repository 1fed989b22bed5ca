"""Lower bounds and good choices of a priced network by sequential tree-reweighted message passing.

Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 28(10), 2006 (TRW-S). Usage
enters as Lagrangian prices on time points, moved by subgradient steps (Held, Wolfe and Crowder 1974).
"""

from __future__ import annotations

import numpy as np
from scipy import sparse

from autopar.search.network import Array, Network

_reduce_min = np.minimum.reduce


class Pricing:
    """Usage of a network as one sparse matrix: prices in, priced node costs out; choices in, usage out."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.nodes = network.nodes()
        sizes = [network.size(node) for node in self.nodes]
        self.bounds = np.cumsum([0, *sizes])
        self.place = {node: index for index, node in enumerate(self.nodes)}
        first, last, rows, columns, values = [], [], [], [], []
        count = 0
        for node, load in network.loads.items():
            amounts = network.amounts(node)
            row, column = np.nonzero(amounts)
            rows.append(row + count)
            columns.append(column + self.bounds[self.place[node]])
            values.append(amounts[row, column])
            first.append(load.first)
            last.append(load.last)
            count += len(load.first)
        shape = (count, int(self.bounds[-1]))
        self.first, self.last = _joined(first), _joined(last)
        self.amounts = sparse.csr_matrix((_joined(values), (_joined(rows), _joined(columns))), shape=shape)
        self.by_strategy = self.amounts.T.tocsr()
        unary = [network.unary[node] for node in self.nodes]
        self.unary = np.concatenate(unary) if unary else np.zeros(0)

    def priced(self, prices: Array) -> Array:
        """Node costs plus usage at `prices` (quanta per unit of usage, per time point), flat over all strategies."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        costs: Array = self.unary + self.by_strategy @ (total[self.last] - total[self.first])
        return costs

    def usage(self, positions: Array) -> Array:
        """Usage at every time point for one position per node, in the order of `nodes`."""
        picked = np.zeros(len(self.unary))
        picked[self.bounds[:-1] + positions] = 1.0
        amounts = self.amounts @ picked
        points = len(self.network.times) + 1
        change = np.bincount(self.first, amounts, points) - np.bincount(self.last, amounts, points)
        return np.cumsum(change)[:-1]


def _joined(parts: list[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


class Messages:
    """TRW-S over one network; messages persist, so that small changes of the prices cost few passes."""

    def __init__(self, pricing: Pricing) -> None:
        network = pricing.network
        self.pricing = pricing
        self.offset = network.offset
        order = sorted(pricing.nodes)  # the problem's own order is that of execution: the network is narrow along it
        turn = {node: index for index, node in enumerate(order)}
        self.order = [pricing.place[node] for node in order]
        count = len(order)
        self.inbox: list[Array] = []  # one array per (edge, direction), the message into a node
        # per node: (message out, message in, costs by [other, own]) to later nodes, and with the other to earlier ones
        self.later: list[list[tuple[int, int, Array]]] = [[] for _ in range(count)]
        self.earlier: list[list[tuple[int, int, int, Array]]] = [[] for _ in range(count)]
        self.edges: list[tuple[int, int, Array]] = []
        for first in order:
            for second, matrix in network.links[first].items():
                if turn[first] < turn[second]:
                    self._connect(pricing.place[first], pricing.place[second], matrix)
        self.weight = [1.0 / max(1, len(a), len(b)) for a, b in zip(self.later, self.earlier, strict=True)]
        self.beliefs: list[Array] = [np.zeros(0)] * count

    def _connect(self, first: int, second: int, matrix: Array) -> None:
        out, back = len(self.inbox), len(self.inbox) + 1
        self.inbox.extend([np.zeros(matrix.shape[1]), np.zeros(matrix.shape[0])])
        self.later[first].append((out, back, np.ascontiguousarray(matrix.T)))
        self.earlier[second].append((back, out, first, np.ascontiguousarray(matrix)))
        self.edges.append((first, second, matrix))

    def split(self, flat: Array) -> list[Array]:
        """A flat array over all strategies, per node."""
        return np.split(flat, self.pricing.bounds[1:-1])

    def forward(self, costs: list[Array]) -> Array:
        """One pass in order; returns the positions chosen on the way, each given the earlier ones."""
        inbox, positions = self.inbox, np.zeros(len(self.order), dtype=np.int64)
        for node in self.order:
            ahead = costs[node]  # own costs and what the later nodes say
            for _, back, _ in self.later[node]:
                ahead = ahead + inbox[back]
            belief = conditional = ahead
            for _, edge, other, matrix in self.earlier[node]:
                belief = belief + inbox[edge]
                conditional = conditional + matrix[positions[other]]
            positions[node] = conditional.argmin()
            belief = self.weight[node] * belief
            for out, back, matrix in self.later[node]:
                inbox[out] = _reduce_min(matrix + (belief - inbox[back]), axis=1)
        return positions

    def backward(self, costs: list[Array]) -> float:
        """One pass in reverse; returns a lower bound on the least total cost, offset included."""
        inbox, bound = self.inbox, self.offset
        for node in reversed(self.order):
            belief = costs[node]
            for _, back, _ in self.later[node]:
                belief = belief + inbox[back]
            for _, edge, _, _ in self.earlier[node]:
                belief = belief + inbox[edge]
            least = _reduce_min(belief)
            bound += least
            belief = belief - least
            self.beliefs[node] = belief
            belief = self.weight[node] * belief
            for out, back, _, matrix in self.earlier[node]:
                message = _reduce_min(matrix + (belief - inbox[back]), axis=1)
                least = _reduce_min(message)
                bound += least
                inbox[out] = message - least
        return float(bound)

    def cost(self, positions: Array) -> float:
        """Cost of a choice in quanta, usage not priced."""
        total = self.offset + float(self.pricing.unary[self.pricing.bounds[:-1] + positions].sum())
        return total + float(sum(matrix[positions[first], positions[second]] for first, second, matrix in self.edges))
