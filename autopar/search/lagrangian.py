"""Memory as prices: a lower bound, prices for the search for choices, and strategies that no better choice can use.

The subgradient of Held, Wolfe and Crowder (1974) on prices per time point, only at time points that were ever over
capacity; the priced network is bounded by message passing (`messages`). Strategies whose bound passes the incumbent
are dropped (reduced-cost fixing).
"""

from __future__ import annotations

import math
import time

import numpy as np

from autopar.search.messages import Messages
from autopar.search.network import Array
from autopar.search.pricing import Pricing

_SMOOTHING = 0.6  # share of the previous direction: usages of single passes jump between extremes
_PATIENCE = 4  # passes without a better bound before the step is halved
_SMALLEST_STEP = 1e-9  # relative to the gap
_TOLERANCE = 1e-10  # relative: what summing in float64 may add to a bound


class PricedSearch:
    """Prices and messages of one network; every call of `run` continues where the last one stopped."""

    def __init__(self, pricing: Pricing, messages: Messages, prices: Array) -> None:
        self.pricing, self.messages = pricing, messages
        self.prices = prices
        self.best_prices = self.prices
        self.best_state = messages.state()  # messages of a worse point may end in a worse fixed point
        self.bound = -math.inf  # quanta
        self.step = 0.1
        self.direction: Array | None = None
        self.stalled = self.rising = 0

    def run(self, passes: int, *, deadline: float = math.inf, upper: float = math.inf) -> None:
        """Up to `passes` double passes; `upper` (quanta) is the cost of a known choice, which sizes the steps."""
        pricing, messages = self.pricing, self.messages
        for _ in range(passes):
            if time.monotonic() > deadline or self.is_tight(upper):
                return
            costs = pricing.priced(self.prices)
            messages.forward(costs)
            bound = messages.backward(costs) - float(self.prices @ pricing.capacity)
            self._note(bound)
            if len(pricing.capacity):
                positions = messages.choose(costs)
                excess = pricing.usage(positions) - pricing.capacity
                self._move_prices(excess, bound, upper if math.isfinite(upper) else 1.1 * max(bound, self.bound))

    def is_tight(self, upper: float) -> bool:
        """Whether the bound has reached the cost of a known choice."""
        return math.isfinite(upper) and upper - self.bound <= _TOLERANCE * abs(upper)

    def suggestion(self) -> Array:
        """Positions that the messages suggest under the best prices; they need not fit."""
        return self.messages.choose(self.pricing.priced(self.best_prices))

    def _note(self, bound: float) -> None:
        if not math.isfinite(self.bound) or bound > self.bound + 1e-7 * abs(self.bound):
            self.bound, self.best_prices, self.best_state = bound, self.prices, self.messages.state()
            self.stalled, self.rising = 0, self.rising + 1
        else:
            self.bound = max(self.bound, bound)
            self.stalled, self.rising = self.stalled + 1, 0
        if self.stalled >= _PATIENCE:
            self.step, self.stalled = max(_SMALLEST_STEP, 0.5 * self.step), 0
            self.prices = self.best_prices
            self.messages.restore(self.best_state)
        if self.rising >= 2 * _PATIENCE:
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
        """Per node and strategy, how far the messages think it from the node's best one, in quanta."""
        beliefs = self.pricing.split(self.messages.beliefs(self.pricing.priced(self.best_prices)))
        return dict(zip(self.pricing.nodes, beliefs, strict=True))

    def survivors(self, upper: float) -> dict[int, Array]:
        """Per node with a loser: mask of the strategies that some choice of cost <= `upper` (quanta) may use."""
        pricing, messages, prices = self.pricing, self.messages, self.best_prices
        messages.restore(self.best_state)
        costs = pricing.priced(prices)
        priced_in = float(prices @ pricing.capacity)
        messages.forward(costs)
        bound = messages.backward(costs) - priced_in
        messages.forward(costs)
        self.bound = max(self.bound, messages.backward(costs) - priced_in, bound)
        spare = upper - bound + _TOLERANCE * max(abs(upper), abs(bound), abs(priced_in))
        keep = pricing.split(messages.beliefs(costs) <= spare)
        return {node: mask for node, mask in zip(pricing.nodes, keep, strict=True) if not mask.all()}


def worst_times(excess: Array, present: frozenset[int] = frozenset(), count: int = 100) -> Array:
    """Up to `count` time points over capacity and not `present`: the worst of each stretch of the horizon."""
    over = np.flatnonzero(excess > 0)
    if present:
        over = over[~np.isin(over, np.fromiter(present, dtype=np.int64))]
    if len(over) <= count:
        return over
    pieces = np.array_split(over, count)
    return np.array([piece[int(excess[piece].argmax())] for piece in pieces])
