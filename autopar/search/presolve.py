"""Exact reductions of a network: each keeps the optimum and logs how to undo itself.

Arc consistency (Mackworth 1977), folding of functionally determined neighbours, equivalence-preserving moves of row
and column minima into the nodes (Cooper et al., "Soft arc consistency revisited", AIJ 174, 2010), elimination of nodes
of degree 0, 1 and 2 (Scholz and Eckstein 2002, "Register allocation for irregular architectures", for PBQP), dominance
(Goldstein 1994).
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from autopar.search.capacity import crowded_times, oversized
from autopar.search.network import Array, Network, Step

DOMINANCE_CELLS = 3_200_000
_GROWTH = 1.5  # the factor by which eliminating a node of degree two may increase the number of pairs


class Deadend(Exception):
    """No choice avoids every forbidden pair."""


class Overfull(Exception):
    """At these time points even the least usages exceed the limit."""

    def __init__(self, times: Array) -> None:
        self.times = times
        super().__init__()


def presolve(network: Network, *, deadline: float = np.inf, dominance_cells: int = DOMINANCE_CELLS) -> None:
    """Reduce to a fixed point, or until `deadline` (`time.monotonic` seconds); raises `Deadend` and `Overfull`.

    `dominance_cells` bounds the three-way table (strategies by strategies by pairs) that a dominance test may build.
    """
    Reducer(network, deadline, dominance_cells).run()


class Reducer:
    """One run of the reductions over one network; holds the queues of what to look at again."""

    def __init__(self, network: Network, deadline: float, dominance_cells: int) -> None:
        self.network, self.deadline = network, deadline
        self.dominance_cells = dominance_cells
        self.edges: deque[tuple[int, int]] = deque()
        self.queued: set[tuple[int, int]] = set()
        self.touched: deque[int] = deque()
        self.untested: set[int] = set()  # nodes that have changed since their last dominance test

    def run(self) -> None:
        """Arc consistency and folding first, then elimination and dominance, until nothing changes."""
        network = self.network
        self.touched.extend(network.nodes())
        self.untested.update(network.nodes())
        for node in network.nodes():
            self.push_edges(node)
        changed = True
        while changed and time.monotonic() < self.deadline:
            self.drain()
            self.settle()
            if self.drop_oversized():
                continue
            changed = self.eliminate_low_degrees()
            self.drain()
            if not changed and self.dominance_cells:
                changed = self.drop_dominated()
        self.settle()  # what was folded when the time was up

    def settle(self) -> None:
        """Bring loads to the nodes that are left."""
        if not self.network.settle_loads():
            raise Overfull(self.network.tight_times)

    def push_edges(self, node: int) -> None:
        """Look again at every edge of a node that lost strategies."""
        for other in self.network.links[node]:
            self.push(node, other)

    def push(self, first: int, second: int) -> None:
        """Look again at an edge whose costs changed."""
        pair = (first, second) if first < second else (second, first)
        if pair not in self.queued:
            self.queued.add(pair)
            self.edges.append(pair)

    def drain(self) -> None:
        """Look at queued nodes and edges until none is left."""
        while self.edges or self.touched:
            if self.touched:
                node = self.touched.pop()
                self.untested.add(node)
                self.check_node(node)
                continue
            pair = self.edges.popleft()
            self.queued.discard(pair)
            self.untested.update(pair)
            if pair[1] in self.network.links[pair[0]]:
                self.check_edge(*pair)

    def check_node(self, node: int) -> None:
        """Drop forbidden strategies; a node with one strategy dissolves into its neighbours."""
        network = self.network
        if not network.alive[node]:
            return
        keep = network.unary[node] < np.inf
        if not keep.all():
            if not keep.any():
                raise Deadend
            network.restrict(node, keep)
            self.push_edges(node)
        if network.size(node) == 1:
            self.dissolve(node)

    def dissolve(self, node: int) -> None:
        """Fix a node of one strategy: its edges become costs of its neighbours."""
        network = self.network
        network.offset += float(network.unary[node][0])
        others = list(network.links[node])
        for other in others:
            network.unary[other] = network.unary[other] + network.links[node][other][0]
        network.retire(Step(node, (), (), network.labels[node][0], is_fold=False))
        self.touched.extend(others)

    def check_edge(self, first: int, second: int) -> None:
        """Move minima into the nodes, restore arc consistency, then drop or fold what the edge no longer needs."""
        network = self.network
        matrix = network.links[first][second]
        if not self.move_minima(first, second, matrix):
            return
        if not matrix.any():
            network.unlink(first, second)
            return
        finite = matrix < np.inf
        if finite.all():
            return
        second_follows = bool((finite.sum(axis=1) == 1).all())
        first_follows = bool((finite.sum(axis=0) == 1).all())
        if second_follows and first_follows and len(network.links[first]) < len(network.links[second]):
            second_follows = False
        if second_follows:
            self.fold(second, first, finite.argmax(axis=1))
        elif first_follows:
            self.fold(first, second, finite.argmax(axis=0))

    def move_minima(self, first: int, second: int, matrix: Array) -> bool:
        """Returns False where a node lost strategies, so that the edge comes up again."""
        network = self.network
        for node, axis in ((first, 1), (second, 0)):
            least = matrix.min(axis=axis)
            if not least.any():
                continue
            network.unary[node] = network.unary[node] + least
            if least.max() == np.inf:
                np.subtract(matrix, np.expand_dims(np.where(least < np.inf, least, 0.0), axis), out=matrix)
                self.check_node(node)
                return False
            np.subtract(matrix, np.expand_dims(least, axis), out=matrix)
        return True

    def fold(self, node: int, leader: int, position_of: Array) -> None:
        """Let `leader` decide `node`: position_of[strategy of leader] is the one strategy of node that it allows."""
        network = self.network
        leader_rows = np.arange(len(position_of))
        pair_costs = network.links[leader][node][leader_rows, position_of]
        network.unary[leader] = network.unary[leader] + network.unary[node][position_of] + pair_costs
        inherited = {other: matrix[position_of] for other, matrix in network.links[node].items() if other != leader}
        table = network.labels[node][position_of]
        network.retire(Step(node, (leader,), (network.labels[leader],), table, is_fold=True))
        for other, matrix in inherited.items():
            network.link(leader, other, matrix)
            self.push(leader, other)

    def drop_oversized(self) -> bool:
        """Drop strategies that do not fit even next to the least usages of all other nodes."""
        network, masks = self.network, oversized(self.network)
        for node, mask in masks.items():
            if mask.all():
                raise Overfull(crowded_times(network, node))
        for node, mask in masks.items():
            network.restrict(node, ~mask)
            self.push_edges(node)
            self.touched.append(node)
        return bool(masks)

    def eliminate_low_degrees(self) -> bool:
        """Minimise nodes of degree two or less, whose usage does not depend on the strategy, out of the network."""
        network = self.network
        stack = [node for node in network.nodes() if len(network.links[node]) <= 2]
        changed = False
        while stack:
            node = stack.pop()
            if not network.alive[node] or node in network.heavy or len(network.links[node]) > 2:
                continue
            others = tuple(network.links[node])
            if len(others) == 2 and not self.pays_off(node, *others):
                continue
            minimise_out(network, node)
            changed = True
            if len(others) == 2:
                self.push(*others)
            self.touched.extend(others)
            self.drain()
            stack.extend(other for other in others if network.alive[other])
        return changed

    def pays_off(self, node: int, first: int, second: int) -> bool:
        """Whether the table between the two neighbours is not much larger than what it replaces."""
        network = self.network
        own, left, right = network.size(node), network.size(first), network.size(second)
        if left * right * own > 50_000_000:
            return False
        before = own * (left + right)
        extra = 0 if second in network.links[first] else left * right
        return extra <= _GROWTH * before

    def drop_dominated(self) -> bool:
        """Drop strategies that another one of the same node beats, whatever the neighbours choose."""
        changed = False
        untested, self.untested = sorted(self.untested), set()
        for node in untested:
            if time.monotonic() > self.deadline:
                break
            if not self.network.alive[node]:
                continue
            winner = dominators(self.network, node, self.dominance_cells)
            keep = winner == np.arange(len(winner))
            if keep.all():
                continue
            labels = self.network.labels[node].tolist()
            for loser in np.flatnonzero(~keep).tolist():
                self.network.beaten[node, labels[loser]] = labels[winner[loser]]
            self.network.restrict(node, keep)
            self.push_edges(node)
            self.check_node(node)
            changed = True
        return changed


def minimise_out(network: Network, node: int) -> None:
    """Replace a node of degree 0, 1 or 2 by the least cost it can have, as a function of its neighbours."""
    others = tuple(network.links[node])
    labels = network.labels[node]
    scope_labels = tuple(network.labels[other] for other in others)
    if not others:
        network.offset += float(network.unary[node].min())
        network.retire(Step(node, (), (), labels[int(network.unary[node].argmin())], is_fold=False))
        return
    if len(others) == 1:
        table = network.links[others[0]][node] + network.unary[node]
        network.unary[others[0]] = network.unary[others[0]] + table.min(axis=1)
        network.retire(Step(node, others, scope_labels, labels[table.argmin(axis=1)], is_fold=False))
        return
    left = network.links[others[0]][node] + network.unary[node]
    right = network.links[others[1]][node]
    least = np.empty((left.shape[0], right.shape[0]))
    best = np.empty(least.shape, dtype=np.int64)
    for row in range(left.shape[0]):
        table = right + left[row]
        best[row] = table.argmin(axis=1)
        least[row] = table.min(axis=1)
    network.retire(Step(node, others, scope_labels, labels[best], is_fold=False))
    network.link(others[0], others[1], least)


def dominators(network: Network, node: int, cells: int) -> Array:
    """Per strategy: itself, or one that beats it in cost (for every choice of the neighbours) and usage.

    Looks only at nodes whose three-way table stays below `cells`.
    """
    costs = network.unary[node]
    size = len(costs)
    winner = np.arange(size)
    blocks = list(network.links[node].values())
    if size < 2 or size * sum(block.shape[1] for block in blocks) * size > cells:
        return winner
    worst = costs[:, None] - costs[None, :]  # [i, j]: the most that i costs above j
    with np.errstate(invalid="ignore"):
        for block in blocks:
            excess = block[:, None, :] - block[None, :, :]
            excess[np.isnan(excess)] = -np.inf  # both forbidden
            worst = worst + excess.max(axis=2)
    better = ~(worst > 0)
    if node in network.loads and node in network.heavy:
        amounts = network.amounts(node)
        better &= (amounts[:, :, None] <= amounts[:, None, :]).all(axis=0)
    np.fill_diagonal(better, False)
    for loser in range(size):
        standing = better[:, loser] & (winner == np.arange(size))
        if standing.any():
            winner[loser] = int(standing.argmax())
    return winner
