"""Balanced assignment of tokens to experts: each expert gets the same number, and their scores sum to the most.

A transportation problem, solved exactly in two steps. Sinkhorn iterations give each expert a price at which about the
right number of tokens prefer it; then excess tokens move along shortest augmenting paths of experts, each move
the cheapest there is. How long that takes depends on the scores, which is why this is one op, computed on the CPU:
to a tracer it has a fixed shape and no loop.

Sources: the problem, Lewis et al. 2021 (arXiv:2103.16716), equations 3 and 4 (solved by auction there); prices, Cuturi,
NeurIPS 2013; augmenting paths with reduced costs, Ahuja, Magnanti and Orlin, "Network Flows", 1993, section 9.7.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from autopar.ops.define import fake_of, op

Array = npt.NDArray[Any]
TEMPERATURES = (0.2, 0.04, 0.008, 0.002)  # of the scores' spread
ROUNDING = 1e-13  # profits this near, as a share of their spread, are equal
ITERATIONS = 8  # at each temperature: leaves about one token in a hundred to move


@op("balanced_assignment(Tensor scores) -> Tensor")
def balanced_assignment_kernel(scores: Tensor) -> Tensor:
    """int64 [tokens]: the expert of each token, from `scores` [tokens, experts].

    No expert gets more than tokens / experts, rounded up; where they divide, all get the same. The sum of the scores is
    the largest possible, up to rounding in float64. The same scores give the same answer on every run. Infinities
    and not-a-numbers count as the largest and the smallest number there is.
    """
    tokens, experts = scores.shape
    share = -(-tokens // experts)
    values = np.nan_to_num(scores.detach().double().cpu().numpy(), nan=-1e30, posinf=1e30, neginf=-1e30)
    padding = np.zeros((share * experts - tokens, experts))  # as good to all: they take up the spare room
    values = np.concatenate([values, padding])
    prices = balancing_prices(values, share)
    holder = best_at(values - prices)
    _Balancer(values, prices, holder, share).run()
    return torch.from_numpy(holder[:tokens]).to(scores.device)


def balancing_prices(values: Array, share: int) -> Array:
    """[experts]: prices under which about `share` of the tokens like each expert best, by Sinkhorn iterations."""
    prices = np.zeros(values.shape[1])
    spread = values.max() - values.min()
    if spread <= 0:
        return prices
    for temperature in spread * np.array(TEMPERATURES):
        for _ in range(ITERATIONS):
            profits = (values - prices) / temperature
            liking = np.exp(profits - profits.max(1, keepdims=True))
            demand = (liking / liking.sum(1, keepdims=True)).sum(0)
            prices = prices + temperature * np.log(np.maximum(demand, 1e-30) / share)
    return prices


def best_at(profits: Array) -> Array:
    """int64 [tokens]: the most profitable expert of each token; where several are, tokens take turns among them."""
    equal = profits >= profits.max(1, keepdims=True) - ROUNDING * np.ptp(profits)
    turn = np.arange(len(profits)) % equal.sum(1)
    best: Array = (equal.cumsum(1) > turn[:, None]).argmax(1)
    return best


class _Balancer:
    """Moves tokens, in `holder` [tokens], from experts with too many to experts with too few.

    Invariant: no token would gain by another expert at the prices, so the assignment is the best for its counts.
    """

    def __init__(self, values: Array, prices: Array, holder: Array, share: int) -> None:
        self.values, self.prices, self.holder = values, prices, holder
        experts = values.shape[1]
        self.excess = np.bincount(holder, minlength=experts) - share
        self.loss = np.full((experts, experts), np.inf)  # of the best token to move from a row's expert to a column's
        self.mover = np.zeros((experts, experts), dtype=np.int64)  # that token
        for expert in range(experts):
            self.look(expert)

    def look(self, expert: int) -> None:
        """Find the cheapest moves away from an expert."""
        held = np.flatnonzero(self.holder == expert)
        if not len(held):
            self.loss[expert] = np.inf
            return
        losses = self.values[held, expert][:, None] - self.values[held]
        cheapest = losses.argmin(0)
        self.mover[expert] = held[cheapest]
        self.loss[expert] = losses[cheapest, np.arange(losses.shape[1])]

    def run(self) -> None:
        """Until every expert has its share."""
        while (self.excess > 0).any():
            source = int(self.excess.argmax())
            while self.excess[source] > 0:
                self.move_along(self.cheapest_path(source))

    def cheapest_path(self, source: int) -> list[int]:
        """Experts from `source` to one with too few; prices become those of the assignment after the move."""
        reduced = np.maximum(self.loss - self.prices[:, None] + self.prices, 0.0)
        distance = np.full(len(reduced), np.inf)
        distance[source] = 0.0
        before = np.full(len(reduced), -1)
        while True:
            through = distance[:, None] + reduced
            nearest = through.argmin(0)
            found = through[nearest, np.arange(len(reduced))]
            closer = found < distance
            if not closer.any():
                break
            distance = np.where(closer, found, distance)
            before = np.where(closer, nearest, before)
        short = np.flatnonzero(self.excess < 0)
        path = [int(short[distance[short].argmin()])]
        self.prices -= np.minimum(distance, distance[path[0]])
        while path[-1] != source:
            path.append(int(before[path[-1]]))
        return path[::-1]

    def move_along(self, path: list[int]) -> None:
        for giver, taker in itertools.pairwise(path):
            self.holder[self.mover[giver, taker]] = taker
        self.excess[path[0]] -= 1
        self.excess[path[-1]] += 1
        for expert in path:
            self.look(expert)


@fake_of("balanced_assignment")
def _(scores: Tensor) -> Tensor:
    return scores.new_empty((scores.shape[0],), dtype=torch.int64)


def balanced_assignment(scores: Tensor) -> Tensor:
    """int64 [tokens]: the expert of each token, from `scores` [tokens, experts]; see above. It has no gradient."""
    experts: Tensor = torch.ops.autopar.balanced_assignment(scores)
    return experts
