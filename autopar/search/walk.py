"""A choice that single moves change cheaply: the common ground of the strategies that only look, never prove."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autopar.errors import InfeasibleProblemError
from autopar.search.anytime import Anytime, Observer
from autopar.search.build import Built, build_network, tight_interval
from autopar.search.greedy import FORBIDDEN_QUANTA, choose_until_it_fits
from autopar.search.network import Array, Network
from autopar.search.presolve import Deadend, Overfull, presolve
from autopar.search.pricing import Pricing
from autopar.search.problem import Problem
from autopar.search.solution import Solution


class Walk:
    """Positions of all nodes of a network, their cost (quanta), and how far usage passes the capacities.

    `price` turns usage over capacity, summed over time points and in units of the greatest capacity, into quanta.
    """

    def __init__(self, network: Network, positions: Array, price: float) -> None:
        self.network, self.price = network, price
        self.pricing = Pricing(network)
        self.nodes = self.pricing.nodes
        self.positions = positions.copy()
        self.links = [
            [(self.pricing.place[other], np.minimum(matrix, FORBIDDEN_QUANTA)) for other, matrix in links.items()]
            for links in (network.links[node] for node in self.nodes)
        ]
        self.unit = 1.0 / max(1.0, float(network.capacity.max(initial=1.0)))
        self.usage = self.pricing.usage(self.positions)
        self.cost = self._total()
        self.excess = self._over(self.usage)

    def _total(self) -> float:
        total = self.network.offset
        for place, node in enumerate(self.nodes):
            at = self.positions[place]
            total += self.network.unary[node][at]
            total += sum(matrix[at, self.positions[other]] for other, matrix in self.links[place] if place < other)
        return float(total)

    def _over(self, usage: Array) -> float:
        return float(np.maximum(usage - self.network.capacity, 0.0).sum()) * self.unit

    @property
    def fits(self) -> bool:
        """Whether the present choice keeps all capacities and avoids all forbidden pairs."""
        return self.excess == 0 and self.cost < FORBIDDEN_QUANTA

    def conditional(self, place: int) -> Array:
        """Cost of each strategy of a node, all others as they are."""
        costs: Array = self.network.unary[self.nodes[place]]
        for other, matrix in self.links[place]:
            costs = costs + matrix[:, self.positions[other]]
        return costs

    def moved_usage(self, place: int, position: int) -> Array:
        """The usage profile after a move."""
        node = self.nodes[place]
        load = self.network.loads.get(node)
        if load is None:
            return self.usage
        amounts = self.network.amounts(node)
        change = amounts[:, position] - amounts[:, self.positions[place]]
        points = len(self.usage) + 1
        steps = np.bincount(load.first, change, points) - np.bincount(load.last, change, points)
        moved: Array = self.usage + np.cumsum(steps)[:-1]
        return moved

    def try_move(self, place: int, position: int, allowed: float) -> bool:
        """Make a move if cost plus priced excess rises by at most `allowed` (quanta); returns whether it was made."""
        costs = self.conditional(place)
        rise = float(costs[position] - costs[self.positions[place]])
        usage = self.moved_usage(place, position)
        excess = self._over(usage) if usage is not self.usage else self.excess
        if rise + self.price * (excess - self.excess) > allowed:
            return False
        self.positions[place] = position
        self.usage, self.excess, self.cost = usage, excess, self.cost + rise
        return True

    def descend(self, deadline_passed: Callable[[], bool]) -> None:
        """First-improvement moves of single nodes until none helps."""
        active = True
        while active and not deadline_passed():
            active = False
            for place in range(len(self.nodes)):
                order = np.argsort(self.conditional(place), kind="stable")[:4]
                active |= any(self.try_move(place, int(position), -1e-9) for position in order.tolist())
                if deadline_passed():
                    return


class Lookers:
    """A reduced network and an anytime record, for strategies that look for choices without a proof."""

    def __init__(self, problem: Problem, name: str, time_limit_s: float, observer: Observer | None) -> None:
        self.run = Anytime(problem, name, time_limit_s, observer)
        self.problem = problem
        self.built: Built = build_network(problem)
        try:
            presolve(self.built.network, deadline=self.run.deadline)
        except Deadend:
            raise InfeasibleProblemError("no choice avoids every forbidden strategy and pair") from None
        except Overfull as full:
            raise tight_interval(problem, full.times) from None
        self.network = self.built.network
        self.pricing = Pricing(self.network)

    def offer(self, positions: Array) -> bool:
        """Hand a choice, one position per node of `pricing.nodes`, to the record."""
        picked = dict(zip(self.pricing.nodes, positions.tolist(), strict=True))
        return self.run.offer(self.built.choice(self.network.recover(self.network.labelled(picked))))

    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.run.left() <= 0

    def first_positions(self, start: Sequence[int] | None) -> Array | None:
        """The positions of a given choice, where the reductions kept it."""
        if start is None:
            return None
        self.run.offer(start)
        labels = np.zeros(len(self.network.alive), dtype=np.int64)
        labels[list(self.built.node_of)] = start
        located = self.network.located(labels)
        return None if located is None else np.array([located[node] for node in self.pricing.nodes], dtype=np.int64)

    def fair_price(self) -> float:
        """Quanta per capacity unit of excess: enough that a whole choice's cost pays for one percent of a capacity."""
        costs = [float(unary.max(initial=0.0)) for unary in self.network.unary if len(unary)]
        return 100.0 * (abs(self.network.offset) + sum(costs) + 1.0)

    def attempt(self, choose: Callable[[Array], Array]) -> Array | None:
        """Choose under rising prices on usage until the choice fits; offers it, and returns it in any case."""
        positions = choose_until_it_fits(self.pricing, choose, self.run.deadline)
        if positions is not None:
            self.offer(positions)
        return positions

    def finish(self, body: Callable[[], None]) -> Solution:
        """Run the search; Ctrl-C ends it, not the answer."""
        try:
            if self.network.nodes():
                body()
            else:
                self.offer(np.zeros(0, dtype=np.int64))
        except KeyboardInterrupt:
            pass
        return self.run.solution()
