"""Exact minimisation without capacities: bucket elimination over a tree decomposition.

Dechter, "Bucket elimination: a unifying framework for reasoning", AIJ 113, 1999. The order is greedy: next the node
whose neighbours' joint table is smallest.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from autopar.search.network import Array, Network


class Elimination:
    """An elimination order for one network, reusable under other node costs.

    `plan` gives None where a joint table would pass `max_cells`, or all tables together ten times that.
    """

    def __init__(self, network: Network, order: list[tuple[int, tuple[int, ...]]]) -> None:
        self.network = network
        self.order = order  # (node, the later nodes it is joined with when its turn comes)

    @classmethod
    def plan(cls, network: Network, *, max_cells: float = 2e6) -> Elimination | None:
        """Order the nodes greedily, or give up where the network is too wide."""
        joined = {node: set(network.links[node]) for node in network.nodes()}
        size = {node: float(network.size(node)) for node in joined}

        def cells(node: int) -> float:
            return size[node] * math.prod(size[other] for other in joined[node])

        queue = [(cells(node), node) for node in joined]
        heapq.heapify(queue)
        order: list[tuple[int, tuple[int, ...]]] = []
        total = 0.0
        while queue:
            cost, node = heapq.heappop(queue)
            if node not in joined or cost != cells(node):
                continue  # out of date: a newer entry is in the queue
            total += cost
            if cost > max_cells or total > 10 * max_cells:
                return None
            scope = joined.pop(node)
            order.append((node, tuple(sorted(scope))))
            for other in scope:
                joined[other] |= scope
                joined[other] -= {other, node}
                heapq.heappush(queue, (cells(other), other))
        return cls(network, order)

    def minimise(self, unary: dict[int, Array] | None = None) -> tuple[float, dict[int, int]]:
        """(least cost in quanta, positions that reach it), under `unary` in place of the network's node costs."""
        network = self.network
        costs = unary or {node: network.unary[node] for node, _ in self.order}
        waiting: dict[int, list[tuple[tuple[int, ...], Array]]] = {node: [] for node, _ in self.order}
        turn = {node: index for index, (node, _) in enumerate(self.order)}
        best: list[Array] = []
        value = network.offset
        for node, scope in self.order:
            table = self._join(node, scope, costs[node], waiting.pop(node), turn)
            best.append(table.argmin(axis=-1))
            least = table.min(axis=-1)
            if scope:
                waiting[min(scope, key=turn.__getitem__)].append((scope, least))
            else:
                value += float(least)
        positions: dict[int, int] = {}
        for (node, scope), table in zip(reversed(self.order), reversed(best), strict=True):
            positions[node] = int(table[tuple(positions[other] for other in scope)])
        return value, positions

    def _join(
        self,
        node: int,
        scope: tuple[int, ...],
        unary: Array,
        messages: list[tuple[tuple[int, ...], Array]],
        turn: dict[int, int],
    ) -> Array:
        """Sum of all costs that mention the node, with the node on the last axis."""
        network = self.network
        axes = (*scope, node)
        table = np.zeros([network.size(other) for other in axes]) + unary
        for other, matrix in network.links[node].items():
            if turn[other] > turn[node]:
                shape = [1] * len(axes)
                shape[axes.index(other)], shape[-1] = matrix.shape[1], matrix.shape[0]
                table += matrix.T.reshape(shape)
        for message_scope, message in messages:
            table += _spread(message, message_scope, axes)
        return table


def _spread(message: Array, scope: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    """The message with its axes in the order of `axes` and length one elsewhere."""
    place = [axes.index(node) for node in scope]
    moved = message.transpose(np.argsort(place))
    shape = [1] * len(axes)
    for at, length in zip(sorted(place), moved.shape, strict=True):
        shape[at] = length
    return moved.reshape(shape)
