"""Strategies to compare against: greedy, local search, annealing, Metropolis walks, beam search, random choices, dp.

None of them is the planner's; each is short enough to read, and they share the reductions of the `ilp` strategy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from autopar.errors import TooWideError
from autopar.search.anytime import Observer
from autopar.search.elimination import Elimination
from autopar.search.greedy import FORBIDDEN_QUANTA, greedy_positions
from autopar.search.network import Array
from autopar.search.problem import Problem
from autopar.search.solution import Solution
from autopar.search.walk import Lookers, Walk


def solve_greedily(problem: Problem, time_limit_s: float, seed: int, *, observer: Observer | None = None) -> Solution:
    """Node after node in execution order, each the cheapest given the earlier ones; prices on usage until it fits."""
    look = Lookers(problem, "greedy", time_limit_s, observer)
    return look.finish(lambda: _attempt(look, lambda costs: greedy_positions(look.network, look.pricing, costs)))


def _attempt(look: Lookers, choose: Callable[[Array], Array]) -> None:
    look.attempt(choose)


def _started(look: Lookers, start: Sequence[int] | None) -> Array:
    positions = look.first_positions(start)
    if positions is None:
        positions = look.attempt(lambda costs: greedy_positions(look.network, look.pricing, costs))
    return np.zeros(len(look.pricing.nodes), dtype=np.int64) if positions is None else positions


def solve_locally(
    problem: Problem,
    time_limit_s: float,
    seed: int,
    *,
    start: Sequence[int] | None = None,
    observer: Observer | None = None,
) -> Solution:
    """Descent by moves of single nodes, restarted from the incumbent with a tenth of the nodes moved at random.

    Iterated local search: Lourenço, Martin and Stützle, Handbook of Metaheuristics, 2003.
    """
    look = Lookers(problem, "local", time_limit_s, observer)
    random = np.random.default_rng(seed)

    def body() -> None:
        walk = Walk(look.network, _started(look, start), look.fair_price())
        best = math.inf
        kept = walk.positions.copy()
        for _ in range(1000):
            walk.descend(look.is_over)
            if walk.fits and walk.cost < best:
                best, kept = walk.cost, walk.positions.copy()
                look.offer(kept)
            if look.is_over():
                return
            walk = Walk(look.network, _shaken(look, kept, random), look.fair_price())

    return look.finish(body)


def _shaken(look: Lookers, positions: Array, random: np.random.Generator) -> Array:
    sizes = np.diff(look.pricing.bounds)
    moved = random.random(len(positions)) < 0.1
    return np.where(moved, random.integers(0, sizes), positions)


def _metropolis(look: Lookers, walk: Walk, seed: int, temperature_at: Callable[[float], float]) -> None:
    """Metropolis et al. 1953: random single moves, accepted by the temperature at the share of time gone."""
    random = np.random.default_rng(seed)
    sizes = np.diff(look.pricing.bounds)
    best = walk.cost if walk.fits else math.inf
    limit = look.run.left()
    while (left := look.run.left()) > 0:
        temperature = temperature_at(1.0 - left / limit)
        for place in random.integers(0, len(sizes), 200).tolist():
            allowed = -temperature * math.log(1.0 - random.random())
            walk.try_move(place, int(random.integers(0, sizes[place])), allowed)
            if walk.fits and walk.cost < best - 1e-9:
                best = walk.cost
                look.offer(walk.positions)


def solve_by_annealing(
    problem: Problem,
    time_limit_s: float,
    seed: int,
    *,
    start: Sequence[int] | None = None,
    observer: Observer | None = None,
) -> Solution:
    """Simulated annealing (Kirkpatrick, Gelatt and Vecchi 1983), cooled geometrically over the time limit."""
    look = Lookers(problem, "anneal", time_limit_s, observer)

    def body() -> None:
        walk = Walk(look.network, _started(look, start), look.fair_price())
        hot = abs(walk.cost) / len(walk.nodes) + 1.0
        _metropolis(look, walk, seed, lambda gone: hot * 1e-4**gone)

    return look.finish(body)


def solve_by_mcmc(
    problem: Problem,
    time_limit_s: float,
    seed: int,
    *,
    start: Sequence[int] | None = None,
    observer: Observer | None = None,
) -> Solution:
    """A Metropolis walk at one temperature, as FlexFlow searches (Jia, Zaharia and Aiken, MLSys 2019)."""
    look = Lookers(problem, "mcmc", time_limit_s, observer)

    def body() -> None:
        walk = Walk(look.network, _started(look, start), look.fair_price())
        warm = 0.05 * (abs(walk.cost) / len(walk.nodes) + 1.0)
        _metropolis(look, walk, seed, lambda gone: warm)

    return look.finish(body)


def solve_by_beam(problem: Problem, time_limit_s: float, seed: int, *, observer: Observer | None = None) -> Solution:
    """Beam search (Lowerre 1976) in execution order: the 32 best partial choices survive each node."""
    look = Lookers(problem, "beam", time_limit_s, observer)
    return look.finish(lambda: _attempt(look, lambda costs: _beam_positions(look, costs, 32)))


def _beam_positions(look: Lookers, costs: Array, width: int) -> Array:
    pricing, network = look.pricing, look.network
    chosen = np.zeros((1, len(pricing.nodes)), dtype=np.int64)
    totals = np.zeros(1)
    for place, node in enumerate(pricing.nodes):
        own = costs[pricing.bounds[place] : pricing.bounds[place + 1]]
        table = totals[:, None] + own
        for other, matrix in network.links[node].items():
            at = pricing.place[other]
            edge = matrix[:, chosen[:, at]].T if at < place else matrix.min(axis=1)[None, :]
            table = table + np.minimum(edge, FORBIDDEN_QUANTA)
        flat = table.reshape(-1)
        best = np.argsort(flat, kind="stable")[:width]
        parent, position = np.divmod(best, len(own))
        chosen, totals = chosen[parent], flat[best]
        chosen[:, place] = position
    least: Array = chosen[0]
    return least


def solve_at_random(problem: Problem, time_limit_s: float, seed: int, *, observer: Observer | None = None) -> Solution:
    """Uniform random choices of the reduced network, at most 10,000: the floor under every other strategy."""
    look = Lookers(problem, "random", time_limit_s, observer)
    random = np.random.default_rng(seed)
    sizes = np.diff(look.pricing.bounds)

    def body() -> None:
        for _ in range(10_000):
            if look.is_over():
                return
            look.offer(random.integers(0, sizes))

    return look.finish(body)


def solve_by_dp(problem: Problem, time_limit_s: float, seed: int, *, observer: Observer | None = None) -> Solution:
    """Dynamic programming over a tree decomposition: exact where the usage limit does not bind.

    Where it binds, one uniform price on usage is bisected (Everett 1963): the bound stays proven, the choice is the
    best seen that fits. Raises `TooWideError` where the tables would not fit in memory.
    """
    look = Lookers(problem, "dp", time_limit_s, observer)
    elimination = Elimination.plan(look.network, max_cells=2e7)
    if elimination is None:
        raise TooWideError(
            "the problem's tree decomposition is too wide for dynamic programming",
            fix="use strategy='ilp', which does not need a narrow problem",
        )
    return look.finish(lambda: _bisect_price(look, elimination))


def _bisect_price(look: Lookers, elimination: Elimination) -> None:
    network, pricing = look.network, look.pricing
    capacity = network.capacity
    low, high = 0.0, math.inf
    price = 0.0
    for _ in range(60):
        if look.is_over():
            return
        flat = pricing.priced(np.full(len(capacity), price))
        unary = dict(zip(pricing.nodes, np.split(flat, pricing.bounds[1:-1]), strict=True))
        value, picked = elimination.minimise(unary)
        look.run.raise_bound(network.to_cost(value - price * float(capacity.sum()) - network.rounding))
        positions = np.array([picked[node] for node in pricing.nodes], dtype=np.int64)
        if not (pricing.usage(positions) > capacity).any():
            look.offer(positions)
            if price == 0:
                return
            high = price
        else:
            low = price
        if math.isfinite(high):
            price = 0.5 * (low + high)
        else:
            price = price * 4.0 if price else look.fair_price() * 1e-6 / max(1.0, float(capacity.sum()))
