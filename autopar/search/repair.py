"""From a choice that is a little over capacity to one that fits, and down to where no single move helps.

Each repairing move is the one that costs least per unit of usage it frees at the worst time point; each polishing move
is the cheapest that keeps all capacities. Both look at every strategy of every node at once.
"""

from __future__ import annotations

import time

import numpy as np

from autopar.search.messages import Pricing
from autopar.search.network import Array

_MOST_MOVES = 5000  # of polishing
_FAR = 2.0**60  # quanta; stands for infinity where costs are subtracted


class Repairer:
    """Keeps, for one choice of a network, the cost of every strategy given all other nodes, in one flat array."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing = pricing
        self.network = pricing.network
        self.bounds = pricing.bounds
        self.owner = np.repeat(np.arange(len(pricing.nodes)), np.diff(self.bounds))
        self.links = [
            [(pricing.place[other], np.minimum(matrix, _FAR)) for other, matrix in self.network.links[node].items()]
            for node in pricing.nodes
        ]
        self.positions = np.zeros(len(pricing.nodes), dtype=np.int64)
        self.usage = np.zeros(len(self.network.capacity))
        self.given = pricing.unary.copy()  # cost of each strategy, all other nodes as they are

    def begin(self, positions: Array) -> None:
        """Take a choice over."""
        self.positions = positions.copy()
        self.usage = self.pricing.usage(self.positions)
        self.given = np.minimum(self.pricing.unary, _FAR)
        for place, links in enumerate(self.links):
            own = self.given[self.bounds[place] : self.bounds[place + 1]]
            for other, matrix in links:
                own += matrix[:, self.positions[other]]

    def run(self, positions: Array, deadline: float, most_moves: int) -> Array | None:
        """A choice that fits, single moves away from the given one; None where there is none or no time."""
        self.begin(positions)
        if not self._repair(deadline, most_moves):
            return None
        self._polish(deadline)
        return self.positions.copy()

    def _rises(self) -> Array:
        """What moving to each strategy adds to the cost."""
        rises: Array = self.given - self.given[self.bounds[:-1] + self.positions][self.owner]
        return rises

    def _repair(self, deadline: float, most_moves: int) -> bool:
        for _ in range(most_moves):
            excess = self.usage - self.network.capacity
            if not (excess > 0).any():
                return True
            if time.monotonic() > deadline:
                return False
            worst = int(excess.argmax())
            live = (self.pricing.first <= worst) & (worst < self.pricing.last)
            used = self.pricing.by_strategy @ live.astype(np.float64)
            freed = used[self.bounds[:-1] + self.positions][self.owner] - used
            with np.errstate(divide="ignore", invalid="ignore"):
                rate = np.where(freed > 0, self._rises() / np.minimum(freed, excess[worst]), np.inf)
            if not self._first_that_helps(_least(rate, 20), rate):
                return False
        return False

    def _first_that_helps(self, candidates: Array, rate: Array) -> bool:
        now = self._over(self.usage)
        for strategy in candidates.tolist():
            if not rate[strategy] < _FAR / 1e6:
                return False
            usage = self._moved(strategy)
            if self._over(usage) < now:
                self._move(strategy, usage)
                return True
        return False

    def _over(self, usage: Array) -> float:
        return float(np.maximum(usage - self.network.capacity, 0.0).sum())

    def _polish(self, deadline: float) -> None:
        blocked = np.zeros(len(self.given), dtype=bool)
        for _ in range(_MOST_MOVES):
            rises = np.where(blocked, 0.0, self._rises())
            best = int(rises.argmin())
            if rises[best] >= 0 or time.monotonic() > deadline:
                break
            usage = self._moved(best)
            if (usage > self.network.capacity).any():
                blocked[best] = True
            else:
                self._move(best, usage)

    def _moved(self, strategy: int) -> Array:
        """The usage profile after moving the owner of a strategy to it."""
        place = int(self.owner[strategy])
        node = self.pricing.nodes[place]
        load = self.network.loads.get(node)
        if load is None:
            return self.usage
        amounts = self.network.amounts(node)
        change = amounts[:, strategy - self.bounds[place]] - amounts[:, self.positions[place]]
        points = len(self.usage) + 1
        steps = np.bincount(load.first, change, points) - np.bincount(load.last, change, points)
        moved: Array = self.usage + np.cumsum(steps)[:-1]
        return moved

    def _move(self, strategy: int, usage: Array) -> None:
        place = int(self.owner[strategy])
        position = int(strategy - self.bounds[place])
        old = int(self.positions[place])
        for other, matrix in self.links[place]:
            self.given[self.bounds[other] : self.bounds[other + 1]] += matrix[position] - matrix[old]
        self.positions[place] = position
        self.usage = usage


def _least(values: Array, count: int) -> Array:
    """Where the least values stand, ascending."""
    if len(values) <= count:
        return np.argsort(values, kind="stable")
    some = np.argpartition(values, count)[:count]
    ordered: Array = some[np.argsort(values[some], kind="stable")]
    return ordered
