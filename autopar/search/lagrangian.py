"""Memory as prices: a lower bound, feasible choices on the way, and strategies that no better choice can use.

The subgradient of Held, Wolfe and Crowder (1974) on prices per time point, only at time points that were ever over
capacity; the priced network is bounded by message passing (`messages`). Strategies whose bound passes the incumbent
are dropped (reduced-cost fixing).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from autopar.search.messages import Messages, Pricing
from autopar.search.network import Array, Network
from autopar.search.repair import Repairer

_SMOOTHING = 0.6  # share of the previous direction: usages of single passes jump between extremes
_REPAIR_EVERY = 5  # passes between two attempts to make their choice fit
_DEARER = (1.03, 1.2)  # prices at which the choice is likelier to fit
_TOLERANCE = 1e-10  # relative: what summing in float64 may add to a bound


class PricedSearch:
    """Prices and messages of one network; every call of `run` continues where the last one stopped."""

    def __init__(self, network: Network, prices: Array | None = None) -> None:
        self.network = network
        self.pricing = Pricing(network)
        self.messages = Messages(self.pricing)
        self.prices = np.zeros(len(network.capacity)) if prices is None else prices
        self.best_prices = self.prices
        self.best_inbox = list(self.messages.inbox)  # messages of a worse point may end in a worse fixed point
        self.bound = -math.inf  # quanta
        self.cost = math.inf  # quanta, of the best feasible choice
        self.positions: Array | None = None
        self.repairer = Repairer(self.pricing)
        self.since_repair = 0
        self.repair_every: float = _REPAIR_EVERY
        self.step = 0.1
        self.direction: Array | None = None
        self.stalled = 0
        self.rising = 0

    def run(
        self,
        passes: int,
        *,
        deadline: float = math.inf,
        upper: float = math.inf,
        on_choice: Callable[[Array, float], None] | None = None,
    ) -> None:
        """Up to `passes` double passes; `upper` (quanta) is the cost of a known choice, which sizes the steps."""
        for _ in range(passes):
            if time.monotonic() > deadline:
                return
            costs = self.messages.split(self.pricing.priced(self.prices))
            positions = self.messages.forward(costs)
            bound = self.messages.backward(costs) - float(self.prices @ self.network.capacity)
            excess = self.pricing.usage(positions) - self.network.capacity
            if self._keep(positions, excess, deadline, upper) and on_choice is not None and self.positions is not None:
                on_choice(self.positions, self.cost)
            self._note_bound(bound)
            target = min(upper, self.cost)
            if math.isfinite(target) and target - self.bound <= _TOLERANCE * abs(target):
                return
            if len(excess):
                guess = max(self.messages.cost(positions), 1.1 * bound)  # sizes the steps until a choice fits
                self._move_prices(excess, bound, target if math.isfinite(target) else guess)

    def _keep(self, positions: Array, excess: Array, deadline: float, upper: float) -> bool:
        """Note a better feasible choice: what the pass found, or, now and then, what single moves make of it."""
        self.since_repair += 1
        cost, known = self.messages.cost(positions), min(self.cost, upper)
        if cost >= known:
            return False
        if (excess > 0).any() or self.since_repair >= self.repair_every:
            if self.since_repair < self.repair_every:
                return False
            self.since_repair = 0
            repaired = self._fitted(positions, deadline, 300 if math.isfinite(known) else 5000)
            if repaired is None or (cost := self.messages.cost(repaired)) >= known:
                self.repair_every = min(30.0, self.repair_every * 1.5)
                return False
            self.repair_every = _REPAIR_EVERY
            positions = repaired
        self.cost, self.positions = cost, positions.copy()
        return True

    def _fitted(self, positions: Array, deadline: float, moves: int) -> Array | None:
        """The cheapest of: the pass's choice repaired, and the choices under somewhat higher prices repaired."""
        best = self.repairer.run(positions, deadline, moves)
        inbox = list(self.messages.inbox)
        for factor in _DEARER if math.isfinite(self.cost) and self.prices.any() else ():
            dearer = self.messages.forward(self.messages.split(self.pricing.priced(factor * self.prices)))
            self.messages.inbox = list(inbox)
            choice = self.repairer.run(dearer, deadline, moves)
            if choice is not None and (best is None or self.messages.cost(choice) < self.messages.cost(best)):
                best = choice
        return best

    def _note_bound(self, bound: float) -> None:
        if bound > self.bound + 1e-7 * abs(self.bound if math.isfinite(self.bound) else 0.0):
            self.bound, self.best_prices, self.best_inbox = bound, self.prices, list(self.messages.inbox)
            self.stalled, self.rising = 0, self.rising + 1
        else:
            self.bound = max(self.bound, bound)
            self.stalled, self.rising = self.stalled + 1, 0
        if self.stalled >= 4:
            self.step, self.stalled = self.step * 0.5, 0
            self.prices, self.messages.inbox = self.best_prices, list(self.best_inbox)
        if self.rising >= 8:
            self.step, self.rising = self.step * 1.3, 0

    def _move_prices(self, excess: Array, bound: float, target: float) -> None:
        old = excess if self.direction is None else self.direction
        self.direction = _SMOOTHING * old + (1 - _SMOOTHING) * excess
        moved = self.prices > 0
        moved[worst_times(excess)] = True
        moved &= (self.prices > 0) | (self.direction > 0)
        direction = np.where(moved, self.direction, 0.0)
        length = float(direction @ direction)
        if length == 0:
            return
        distance = min(max(1.02 * target - bound, 0.001 * abs(target)), 0.5 * abs(bound) + 1.0)
        self.prices = np.maximum(0.0, self.prices + self.step * distance / length * direction)

    def regrets(self) -> dict[int, Array]:
        """Per node and strategy, how far the last pass thinks it from the node's best one, in quanta."""
        beliefs = zip(self.pricing.nodes, self.messages.beliefs, strict=True)
        return {node: belief for node, belief in beliefs if len(belief)}

    def survivors(self, upper: float) -> dict[int, Array]:
        """Per node with a loser: mask of the strategies that some choice of cost <= `upper` (quanta) may use."""
        prices, self.messages.inbox = self.best_prices, list(self.best_inbox)
        costs = self.messages.split(self.pricing.priced(prices))
        priced_in = float(prices @ self.network.capacity)
        self.messages.forward(costs)
        bound = self.messages.backward(costs) - priced_in
        self.messages.forward(costs)
        self.bound = max(self.bound, self.messages.backward(costs) - priced_in, bound)
        spare = upper - bound + _TOLERANCE * max(abs(upper), abs(bound), abs(priced_in))
        kept = {}
        for node, belief in zip(self.pricing.nodes, self.messages.beliefs, strict=True):
            keep = belief <= spare
            if not keep.all():
                kept[node] = keep
        return kept


def worst_times(excess: Array, present: frozenset[int] = frozenset(), count: int = 100) -> Array:
    """Up to `count` time points over capacity and not `present`: the worst of each stretch of the horizon."""
    over = np.flatnonzero(excess > 0)
    if present:
        over = over[~np.isin(over, np.fromiter(present, dtype=np.int64))]
    if len(over) <= count:
        return over
    pieces = np.array_split(over, count)
    return np.array([piece[int(excess[piece].argmax())] for piece in pieces])
