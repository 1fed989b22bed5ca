"""Large-neighbourhood search: free a part of the incumbent, re-solve it exactly, keep what is better.

Shaw, "Using constraint programming and local search methods to solve vehicle routing problems", CP 1998.
"""

from __future__ import annotations

import math
import time

import numpy as np

from autopar.search.exact import MarginalSearch, fits, pair_count, priced_times, solve_without_capacities
from autopar.search.network import Array, Network
from autopar.search.presolve import Deadend, Overfull, presolve
from autopar.search.relaxation import Relaxation
from autopar.search.subnetwork import subnetwork

_SMALLEST, _LARGEST = 20, 2000  # nodes freed together
_FIRST_PAIRS = 40_000  # allowed pairs in the first neighbourhoods
_PASSES = 12  # double passes of message passing over one neighbourhood
_MOVES = 30  # of a walk through it
_SOLVE_S = 4.0  # seconds for one neighbourhood; half of it used up means: smaller ones next


class Neighbourhoods:
    """Improves a feasible choice of one network; deterministic by seed up to the time limits of its solves."""

    def __init__(
        self,
        network: Network,
        positions: dict[int, int],
        seed: int,
        *,
        prices: Array,
        regrets: dict[int, Array],
    ) -> None:
        self.network = network
        self.positions = dict(positions)
        self.random = np.random.default_rng(seed)
        self.prices = prices
        self.regrets = regrets  # per node and strategy: where it is large, the choice is likely wrong
        self.nodes = network.nodes()
        self.fresh = np.ones(len(self.nodes))  # less after each failure around a node
        pairs_per_node = pair_count(network) / max(1, len(self.nodes))
        self.size = min(len(self.nodes), max(_SMALLEST, min(150, int(_FIRST_PAIRS / max(1.0, pairs_per_node)))))
        self.cost = network.cost_of(self.positions)
        self.seed = seed
        self.round = 0
        self._weigh()

    def _weigh(self) -> None:
        """The chance of each node to be the middle of a neighbourhood."""
        regrets = [float(self.regrets[node][self.positions[node]]) for node in self.nodes]
        weight = np.array(regrets) * self.fresh
        weight = weight + max(0.1 * float(weight.mean()), 1e-9) * self.fresh
        self.chance: Array = weight / weight.sum()

    def take(self, positions: dict[int, int]) -> None:
        """Go on from a choice that fits, if it is better."""
        cost = self.network.cost_of(positions)
        if cost < self.cost:
            self.positions, self.cost = dict(positions), cost
            self._weigh()

    def step(self, deadline: float) -> None:
        """Re-solve one neighbourhood and adapt the size of the next one to how long it took."""
        started = time.monotonic()
        free = self._pick()
        self.round += 1
        better = self.resolve(free, min(deadline, started + _SOLVE_S))
        if better is not None:
            self.positions.update(better)
            self.cost = self.network.cost_of(self.positions)
        self._weigh()
        seconds = time.monotonic() - started
        if seconds > _SOLVE_S / 2:
            self.size = max(_SMALLEST, int(self.size * 0.8))
        elif seconds < _SOLVE_S / 4:
            self.size = min(_LARGEST, len(self.nodes), int(self.size * 1.1) + 1)

    def resolve(self, free: list[int], deadline: float) -> dict[int, int] | None:
        """Better positions for the free nodes, or None."""
        small = subnetwork(self.network, free, self.positions)
        present = {index: self.positions[node] for index, node in enumerate(free)}
        now = small.cost_of(present)
        labels = resolve(small, now, self.prices, self.seed + self.round, deadline)
        if labels is None:
            return None
        changed = {node: int(labels[index]) for index, node in enumerate(free)}
        trial = {**self.positions, **changed}
        if self.network.cost_of(trial) < self.cost and fits(self.network, trial):
            return changed
        return None

    def _pick(self) -> list[int]:
        kind = self.round % 3
        if kind == 0:
            return sorted(self._ball(self.size))
        if kind == 1:
            return self._window()
        parts = int(self.random.integers(2, 5))  # distant nodes trade memory with each other
        return sorted(set().union(*(self._ball(max(2, self.size // parts)) for _ in range(parts))))

    def _ball(self, size: int) -> list[int]:
        """Nodes near a random one, breadth first in random order."""
        start = self.nodes[self._middle()]
        seen, queue = {start}, [start]
        for node in queue:
            others = [other for other in self.network.links[node] if other not in seen]
            if len(others) > 30:  # a hub: some of its neighbours
                others = [others[i] for i in self.random.choice(len(others), 30, replace=False).tolist()]
            seen.update(others)
            queue.extend(others)
            if len(queue) >= size:
                break
        return queue[:size]

    def _middle(self) -> int:
        place = int(self.random.choice(len(self.nodes), p=self.chance))
        self.fresh[place] *= 0.3
        return place

    def _window(self) -> list[int]:
        """A stretch of the execution order."""
        middle = self._middle()
        first = max(0, min(middle - self.size // 2, len(self.nodes) - self.size))
        return self.nodes[first : first + self.size]


def resolve(small: Network, now: float, prices: Array, seed: int, deadline: float) -> Array | None:
    """Labels of all nodes of a small network at a cost below `now` (quanta), if there is one and time to find it."""
    try:
        presolve(small, deadline=deadline, dominance_cells=0)
        labels = _resolve_reduced(small, now, prices, seed, deadline)
    except (Deadend, Overfull):
        return None
    return labels


def _resolve_reduced(small: Network, now: float, prices: Array, seed: int, deadline: float) -> Array | None:
    if not small.nodes():
        return small.recover({}) if small.offset < now else None
    relaxed = solve_without_capacities(small, max_cells=2e5)
    if relaxed is not None:
        if relaxed[0] >= now:
            return None
        if fits(small, relaxed[1]):
            return small.recover(small.labelled(relaxed[1]))
    relaxation = Relaxation(small, prices[small.times], seed, deadline)
    search = relaxation.priced
    search.run(_PASSES, deadline=deadline, upper=now)
    if search.bound >= now:
        return None
    found, upper = None, now
    relaxation.begin_walk(moves=_MOVES)
    relaxation.end_walk()
    walked = relaxation.located()
    if walked is not None and relaxation.cost < now:
        found, upper = small.recover(small.labelled(walked)), relaxation.cost
    times = priced_times(search.best_prices)
    for node, keep in search.survivors(upper).items():
        if not keep.any():
            return found
        small.restrict(node, keep)
    marked = small.times[times]
    presolve(small, deadline=deadline, dominance_cells=0)
    if not small.nodes():
        return small.recover({}) if small.offset < upper else found
    rows = np.flatnonzero(np.isin(small.times, marked))
    hint = small.located(found) if found is not None else None
    exact = MarginalSearch(small, seed, rows).run(deadline, relative_gap=1e-5, hint=hint)
    if exact.positions is None or small.cost_of(exact.positions) >= upper or math.isinf(exact.bound):
        return found
    return small.recover(small.labelled(exact.positions))
