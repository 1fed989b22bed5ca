"""A first choice: node after node, under usage prices that rise until it fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from autopar.search.network import Array, Network
from autopar.search.pricing import Pricing

FORBIDDEN_QUANTA = 2.0**60
"""Stands for infinity where costs are subtracted: above every sum of allowed costs, which stay below 2**52."""

_RISE = 4.0  # each price over the one before
_ATTEMPTS = 40


def greedy_positions(network: Network, pricing: Pricing, costs: Array) -> Array:
    """In execution order, the cheapest given the earlier nodes; an edge to a later node counts with its least cost."""
    positions = np.zeros(len(pricing.nodes), dtype=np.int64)
    for place, node in enumerate(pricing.nodes):
        own = costs[pricing.bounds[place] : pricing.bounds[place + 1]]
        for other, matrix in network.links[node].items():
            at = pricing.place[other]
            edge = matrix[:, positions[at]] if at < place else matrix.min(axis=1)
            own = own + np.minimum(edge, FORBIDDEN_QUANTA)
        positions[place] = own.argmin()
    return positions


def choose_until_it_fits(
    pricing: Pricing, choose: Callable[[Array], Array], deadline: float = math.inf
) -> Array | None:
    """Positions of the first attempt that keeps the capacities, else of the last; None when there was no time.

    `choose` maps node costs, flat over all strategies, to positions. Prices are uniform over time (Everett 1963).
    """
    capacity = pricing.capacity
    largest = float(np.abs(pricing.unary).max(initial=1.0)) + 1.0
    price, positions = 0.0, None
    for _ in range(_ATTEMPTS):
        if time.monotonic() > deadline:
            break
        positions = choose(pricing.priced(np.full(len(capacity), price)))
        if not (pricing.usage(positions) > capacity).any():
            break
        price = price * _RISE if price else 1e-4 * largest / max(1.0, float(capacity.sum()))
    return positions
