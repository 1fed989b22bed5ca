"""One network under attack from both sides: rounds of message passing with prices, and of a walk for choices.

A round is a fixed amount of work on each side, and what they tell each other is exchanged between rounds. So the answer
depends on the seed and on the number of rounds alone, whether the walk has a core of its own or not.
"""

from __future__ import annotations

import math
import os
import time

import numpy as np

from autopar.search.exact import pair_count
from autopar.search.forest_search import ForestSearch
from autopar.search.helper import Answer, Fallback, Order, OwnWalker, Walker
from autopar.search.lagrangian import PricedSearch
from autopar.search.messages import Messages
from autopar.search.network import Array, Network
from autopar.search.pricing import Pricing
from autopar.search.sweep import NODES_PER_BLOCK, Sweep
from autopar.search.tables import Tables

PASSES = 25  # double passes of message passing in a round
MOVES = 100  # forest moves in a round: about as long
_HELPER_PAIRS = 100_000  # a network of so many pairs is worth a second process
_HELPER_S = 5.0  # and so many seconds left
_STALE = 0.01  # a round that raises the bound by less than this share of the gap is stale
_FAR = 0.1  # relative: while no choice is nearer than this, the gap says nothing about the bound


class Relaxation:
    """Prices, messages and a walk over one network as it is now."""

    def __init__(self, network: Network, prices: Array, seed: int, deadline: float) -> None:
        self.network, self.seed, self.deadline = network, seed, deadline
        self.pricing = Pricing(network)
        self.tables = Tables(network, self.pricing)
        count = len(self.pricing.nodes)
        sweep = Sweep(self.tables, count, count // NODES_PER_BLOCK)
        self.priced = PricedSearch(self.pricing, Messages(self.pricing, self.tables, sweep), prices)
        self.best: Array | None = None  # positions of the best choice that fits
        self.cost = math.inf  # quanta
        self.stale = 0  # rounds in a row
        self._walker: Walker | None = None

    def take(self, positions: Array) -> None:
        """Take over a choice that fits."""
        cost = self.tables.cost(self.pricing, positions)
        if cost < self.cost:
            self.best, self.cost = positions, cost

    def round(self, upper: float) -> None:
        """Passes here, a walk there; `upper` (quanta) is the cost of a known choice of the whole problem."""
        upper = min(upper, self.cost)
        before = self.priced.bound
        if not math.isfinite(before):
            self.priced.run(PASSES, deadline=self.deadline, upper=upper)  # something to walk from
        self.begin_walk()
        self.priced.run(PASSES, deadline=self.deadline, upper=upper)
        self.end_walk()
        gap = min(upper, self.cost) - self.priced.bound
        gap = min(gap, _FAR * abs(self.priced.bound))
        raised = self.priced.bound - before
        self.stale = self.stale + 1 if raised <= _STALE * gap else 0

    def bound_until(self, end: float, upper: float) -> None:
        """Message passing until `end`: nothing better is to be done while no choice is known."""
        while time.monotonic() < end and not self.priced.is_tight(upper):
            self.priced.run(PASSES, deadline=end, upper=upper)

    def begin_walk(self, *, moves: int = MOVES, end: float = math.inf) -> None:
        """Order a round of walking: so many moves, or fewer, until `end`."""
        suggestion = self.priced.suggestion()
        if self._walker is None:
            self._walker = self._new_walker(suggestion)
        order = Order(
            moves=moves,
            seconds=max(0.0, min(self.deadline, end) - time.monotonic()),
            suggestion=suggestion,
            prices=self.priced.best_prices,
            bound=self.priced.bound,
            best=self.best,
            cost=self.cost,
        )
        self._walker.order(order)

    def end_walk(self) -> None:
        """Wait for the end of the round and note what it found."""
        assert self._walker is not None
        answer: Answer = self._walker.answer()
        if answer.best is not None and answer.cost < self.cost:
            self.best, self.cost = answer.best, answer.cost

    def _new_walker(self, suggestion: Array) -> Walker:
        start = (self.pricing, self.tables, suggestion, self.priced.best_prices, self.seed)
        worth_it = pair_count(self.network) >= _HELPER_PAIRS and self.deadline - time.monotonic() >= _HELPER_S
        if worth_it and (os.cpu_count() or 1) > 1:
            return Fallback(start)
        return OwnWalker(ForestSearch(*start))

    def located(self) -> dict[int, int] | None:
        """The best choice by node."""
        if self.best is None:
            return None
        return dict(zip(self.pricing.nodes, self.best.tolist(), strict=True))

    def close(self) -> None:
        """End the helper, if there is one."""
        if self._walker is not None:
            self._walker.close()
            self._walker = None


def as_positions(pricing: Pricing, located: dict[int, int]) -> Array:
    """One position per place."""
    return np.array([located[node] for node in pricing.nodes], dtype=np.int64)
