"""The working form of a problem: a network of tables that the reductions shrink, with a way back for every step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Step:
    """How to choose an eliminated node once the nodes of `scope` are chosen: look it up in a table of labels."""

    node: int
    scope: tuple[int, ...]
    scope_labels: tuple[Array, ...]  # per node of the scope: its labels when the step was made, ascending
    table: Array  # labels of `node`, one axis per node of the scope
    is_fold: bool  # the node's usage now travels with the one node of its scope

    def recover(self, picked: Array) -> int:
        """The label of `node`, given the labels picked for its scope."""
        at = tuple(
            int(np.searchsorted(labels, picked[node]))
            for node, labels in zip(self.scope, self.scope_labels, strict=True)
        )
        return int(self.table[at])


@dataclass(frozen=True, slots=True)
class Loads:
    """What a node uses: row r is used over the time points [first[r], last[r]), one amount per strategy."""

    first: Array  # int, indices into the network's time points
    last: Array
    amounts: Array  # float64 [rows, strategies]
    labels: Array  # the node's labels that the columns stand for, ascending


def greatest_amounts(loads: list[Loads]) -> Array:
    """The greatest amount of every row, one after the other."""
    widths = np.concatenate([np.full(len(load.first), load.amounts.shape[1]) for load in loads])
    amounts = np.concatenate([load.amounts.reshape(-1) for load in loads])
    greatest: Array = np.maximum.reduceat(amounts, np.cumsum(widths) - widths)
    return greatest


def sums_over_time(first: Array, last: Array, amounts: Array, points: int) -> Array:
    """What rows that use `amounts` over the time points [first, last) add up to at each of `points`."""
    change = np.bincount(first, amounts, points + 1) - np.bincount(last, amounts, points + 1)
    return np.cumsum(change)[:-1]


class Network:
    """A min-sum network under usage capacities. Reductions change it in place and log the way back in `steps`.

    Invariants: `inf` is forbidden; `links[u][v]` is the transposed view of `links[v][u]`; labels are the strategy
    indices of the problem and ascend; the cost of a full choice is `offset` + its unary costs + its link costs, in
    quanta, and stays so under every reduction (up to choices that another one dominates).
    """

    def __init__(self, sizes: list[int], quantum: float) -> None:
        count = len(sizes)
        self.quantum = quantum  # one unit of cost here, in the problem's unit
        self.offset = 0.0
        self.rounding = 0.0  # the most that all roundings to quanta add up to, in quanta
        self.labels: list[Array] = [np.arange(size) for size in sizes]
        self.unary: list[Array] = [np.zeros(size) for size in sizes]
        self.links: list[dict[int, Array]] = [{} for _ in range(count)]
        self.alive = [True] * count
        self.steps: list[Step] = []
        self.times: Array = np.zeros(0, dtype=np.int64)  # the time points where a capacity may bind
        self.capacity: Array = np.zeros(0)  # per time point: what the alive nodes may use together
        self.tight_times: Array = self.times  # where even the least usages do not fit, found by the last settling
        self.loads: dict[int, Loads] = {}
        self.heavy: set[int] = set()  # alive nodes whose usage depends on the strategy
        self.beaten: dict[tuple[int, int], int] = {}  # (node, label) dropped as dominated -> the label that beats it
        self.folded: list[Step] = []  # folds whose loads have not been moved yet

    def nodes(self) -> list[int]:
        """The nodes not yet decided by a step."""
        return [node for node, alive in enumerate(self.alive) if alive]

    def size(self, node: int) -> int:
        """How many strategies the node still has."""
        return len(self.labels[node])

    def link(self, first: int, second: int, matrix: Array) -> None:
        """Add costs between two nodes; parallel edges merge."""
        present = self.links[first].get(second)
        if present is not None:
            matrix = present + matrix
        self.links[first][second] = matrix
        self.links[second][first] = matrix.T

    def unlink(self, first: int, second: int) -> None:
        """Forget an edge whose costs have moved elsewhere."""
        del self.links[first][second]
        del self.links[second][first]

    def restrict(self, node: int, keep: Array) -> None:
        """Keep only the strategies at `keep` (a mask, or ascending positions)."""
        self.labels[node] = self.labels[node][keep]
        self.unary[node] = self.unary[node][keep]
        for other, matrix in self.links[node].items():
            smaller = matrix[keep]
            self.links[node][other] = smaller
            self.links[other][node] = smaller.T

    def retire(self, step: Step) -> None:
        """Log the way back to a node and take it out; its costs must already have moved."""
        for other in list(self.links[step.node]):
            self.unlink(step.node, other)
        self.alive[step.node] = False
        self.steps.append(step)
        if step.is_fold and step.node in self.heavy:
            self.heavy.add(step.scope[0])
        if step.is_fold:
            self.folded.append(step)
        self.heavy.discard(step.node)

    def recover(self, picked: dict[int, int]) -> Array:
        """Labels for every node from the labels of the alive ones."""
        labels = np.zeros(len(self.alive), dtype=np.int64)
        for node, label in picked.items():
            labels[node] = label
        for step in reversed(self.steps):
            labels[step.node] = step.recover(labels)
        return labels

    def to_cost(self, quanta: float) -> float:
        """Quanta in the problem's unit."""
        return quanta * self.quantum

    def settle_loads(self) -> bool:
        """Move the loads of folded nodes to the nodes that decide them, and drop what cannot bind.

        Returns False where even the least usages exceed a capacity.
        """
        decided = self._decided()
        changed = self._unsettled(decided)
        gathered = self._gather_loads(decided, changed)
        self.folded = []
        for node in changed:
            del self.loads[node]
        return self.store_loads(gathered)

    def store_loads(self, gathered: dict[int, list[Loads]]) -> bool:
        """Add loads; amounts common to all strategies come off the capacity. False: they do not fit."""
        spent = np.zeros(len(self.times) + 1)
        for node, parts in gathered.items():
            self._store(node, parts, spent)
        self.capacity = self.capacity - np.cumsum(spent)[:-1]
        self.tight_times = self.times[self.capacity < 0]
        self._drop_slack_times()
        self.heavy = set(self.loads)
        return not len(self.tight_times)

    def _decided(self) -> dict[int, tuple[int, Array]]:
        """Per node folded since the last settling: (who decides it, its label per label of that node)."""
        decided: dict[int, tuple[int, Array]] = {}
        for step in reversed(self.folded):
            parent = step.scope[0]
            root, labels = decided.get(parent, (parent, self.labels[parent]))
            decided[step.node] = (root, step.table[np.searchsorted(step.scope_labels[0], labels)])
        return decided

    def _unsettled(self, decided: dict[int, tuple[int, Array]]) -> list[int]:
        """The nodes whose loads are not those of their present strategies, or are joined by a folded node's."""
        joined = {root for root, _ in decided.values()}
        return [
            node
            for node, load in self.loads.items()
            if node in decided or node in joined or not self.alive[node] or len(load.labels) != len(self.labels[node])
        ]

    def _gather_loads(self, decided: dict[int, tuple[int, Array]], changed: list[int]) -> dict[int, list[Loads]]:
        gathered: dict[int, list[Loads]] = {}
        for node in changed:
            load = self.loads[node]
            root, labels = decided.get(node, (node, self.labels[node]))
            own = self.labels[root]
            if not self.alive[root]:
                labels, own = labels[:1], own[:1]  # dissolved, or its usage does not depend on the strategy
            amounts = load.amounts[:, np.searchsorted(load.labels, labels)]
            gathered.setdefault(root, []).append(Loads(load.first, load.last, amounts, own))
        return gathered

    def _store(self, node: int, parts: list[Loads], spent: Array) -> None:
        if len(parts) == 1:
            first, last, amounts = parts[0].first, parts[0].last, parts[0].amounts
        else:
            first = np.concatenate([part.first for part in parts])
            last = np.concatenate([part.last for part in parts])
            amounts = np.concatenate([part.amounts for part in parts])
            spans, row_of = np.unique(first * (len(self.times) + 1) + last, return_inverse=True)
            merged = np.zeros((len(spans), amounts.shape[1]))
            np.add.at(merged, row_of, amounts)
            first, last, amounts = spans // (len(self.times) + 1), spans % (len(self.times) + 1), merged
        least = amounts.min(axis=1)
        if least.any():
            np.add.at(spent, first, least)
            np.subtract.at(spent, last, least)
            amounts = amounts - least[:, None]
        rows = np.flatnonzero((amounts.max(axis=1) > 0) & (first < last))
        if len(rows):
            self.loads[node] = Loads(first[rows], last[rows], amounts[rows], parts[0].labels)

    def _drop_slack_times(self) -> None:
        """A time point at which even the greatest usages fit needs no row."""
        if not self.loads:
            self.times, self.capacity = self.times[:0], self.capacity[:0]
            return
        loads = list(self.loads.values())
        first = np.concatenate([load.first for load in loads])
        last = np.concatenate([load.last for load in loads])
        keep = sums_over_time(first, last, greatest_amounts(loads), len(self.times)) > self.capacity
        if bool(keep.all()):
            return
        place = np.concatenate([[0], np.cumsum(keep)])
        self.times, self.capacity = self.times[keep], self.capacity[keep]
        first, last = place[first], place[last]
        rows = first < last
        ends = np.cumsum([len(load.first) for load in loads]).tolist()
        start = 0
        for (node, load), end in zip(list(self.loads.items()), ends, strict=True):
            self._keep_rows(node, load, first[start:end], last[start:end], rows[start:end])
            start = end

    def _keep_rows(self, node: int, load: Loads, first: Array, last: Array, rows: Array) -> None:
        """Store a node's loads with new time points, and only some of its rows."""
        if bool(rows.all()):
            self.loads[node] = Loads(first, last, load.amounts, load.labels)
        elif bool(rows.any()):
            self.loads[node] = Loads(first[rows], last[rows], load.amounts[rows], load.labels)
        else:
            del self.loads[node]

    def profile(self, amounts: dict[int, Array]) -> Array:
        """Usage at every time point, from one amount per load row of each node."""
        nodes = [node for node in amounts if node in self.loads]
        if not nodes:
            return np.zeros(len(self.times))
        first = np.concatenate([self.loads[node].first for node in nodes])
        last = np.concatenate([self.loads[node].last for node in nodes])
        return sums_over_time(first, last, np.concatenate([amounts[node] for node in nodes]), len(self.times))

    def usage_of(self, positions: dict[int, int]) -> Array:
        """Usage of the alive nodes at every time point; `positions` index into each node's labels."""
        return self.usage_of_nodes(self.loads, positions)

    def usage_of_nodes(self, nodes: Iterable[int], positions: dict[int, int]) -> Array:
        """Usage of some nodes alone at every time point."""
        amounts = {}
        for node in nodes:
            load = self.loads.get(node)
            if load is not None:
                column = int(np.searchsorted(load.labels, self.labels[node][positions[node]]))
                amounts[node] = load.amounts[:, column]
        return self.profile(amounts)

    def amounts(self, node: int) -> Array:
        """[load rows, strategies] of a node that has loads, over its present strategies."""
        load = self.loads[node]
        if len(load.labels) == len(self.labels[node]):
            return load.amounts
        return load.amounts[:, np.searchsorted(load.labels, self.labels[node])]

    def cost_of(self, positions: dict[int, int]) -> float:
        """Cost in quanta of a choice of the alive nodes, by position; capacities are not looked at."""
        total = self.offset
        for node, position in positions.items():
            total += self.unary[node][position]
            for other, matrix in self.links[node].items():
                if node < other:
                    total += matrix[position, positions[other]]
        return float(total)

    def labelled(self, positions: dict[int, int]) -> dict[int, int]:
        """The labels at these positions."""
        return {node: int(self.labels[node][position]) for node, position in positions.items()}

    def located(self, labels: Array) -> dict[int, int] | None:
        """Positions of the alive nodes for labels of all nodes; a dominated label gives way to the one that beat it.

        None where a label is gone for another reason.
        """
        positions = {}
        for node in self.nodes():
            label, own = int(labels[node]), self.labels[node]
            at = int(np.searchsorted(own, label))
            while at == len(own) or own[at] != label:
                if (node, label) not in self.beaten:
                    return None
                label = self.beaten[node, label]
                at = int(np.searchsorted(own, label))
            positions[node] = at
        return positions
