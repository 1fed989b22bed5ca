"""The `ilp` strategy: exact reductions, prices, the marginal ILP where it is small enough, neighbourhoods where not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from autopar.errors import InfeasibleProblemError
from autopar.search.anytime import Anytime, Observer
from autopar.search.build import Built, build_network, tight_interval
from autopar.search.exact import MarginalSearch, fits, pair_count, priced_times, solve_without_capacities
from autopar.search.greedy import choose_until_it_fits, greedy_positions
from autopar.search.lagrangian import PricedSearch
from autopar.search.messages import Pricing
from autopar.search.neighbourhood import Neighbourhoods
from autopar.search.network import Array, Network
from autopar.search.presolve import Deadend, Overfull, presolve
from autopar.search.problem import Problem
from autopar.search.solution import Solution

_SMALL_PAIRS = 150_000  # the marginal ILP of so many pairs is worth trying at once
_TINY_PAIRS = 3_000  # and of so many, without prices first
_PRICE_S_PER_PAIR = 2e-5  # seconds of pricing per pair: less than the ILP takes on what pricing would spare it
_PROVEN = 1e-9  # a relative gap that is rounding
_PASSES = 25  # double passes of message passing between two rounds of reductions


def solve_by_ilp(
    problem: Problem,
    time_limit_s: float,
    seed: int,
    *,
    start: Sequence[int] | None = None,
    gap: float = 0.0,
    observer: Observer | None = None,
) -> Solution:
    """Reduce, then solve exactly; after the time limit, the best feasible choice seen and the bound proven by then.

    Raises `InfeasibleProblemError` where no choice is feasible. Ctrl-C ends the search, not the answer.
    """
    run = Anytime(problem, "ilp", time_limit_s, observer)
    if start is not None:
        run.offer(start)
    built = build_network(problem)
    try:
        presolve(built.network, deadline=run.deadline)
        _IlpSearch(run, built, seed, gap).run_all()
    except Deadend:
        _note_nothing_better(run, InfeasibleProblemError("no choice avoids every forbidden strategy and pair"))
    except Overfull as full:
        _note_nothing_better(run, tight_interval(problem, full.times))
    except KeyboardInterrupt:
        pass
    return run.solution()


def _note_nothing_better(run: Anytime, error: InfeasibleProblemError) -> None:
    """Nothing is left: with an incumbent that proves it optimal, without one it proves the problem infeasible."""
    if run.choice is None:
        raise error
    run.raise_bound(run.cost)


class _IlpSearch:
    """One run: holds the shrinking network, the incumbent in its terms, and what is proven."""

    def __init__(self, run: Anytime, built: Built, seed: int, gap: float) -> None:
        self.run, self.built, self.seed = run, built, seed
        self.gap = max(gap, _PROVEN)  # relative
        self.network: Network = built.network
        self.labels: Array | None = None  # of the incumbent, one per network node
        self.prices: Array = np.zeros(len(self.network.capacity))
        self.rounds = 0
        self.search: PricedSearch | None = None  # of the network as it is
        if run.choice is not None:
            self._adopt(run.choice)

    def _adopt(self, choice: Sequence[int]) -> None:
        labels = np.zeros(len(self.network.alive), dtype=np.int64)
        labels[list(self.built.node_of)] = choice
        self.labels = labels

    def run_all(self) -> None:
        """From the cheapest complete method to the ones that only improve."""
        if self._is_done() or self._is_solved_without_capacities():
            return
        if pair_count(self.network) <= _TINY_PAIRS and self._is_solved_by_marginal(self.run.left()):
            return
        self._choose_first()
        self._price()
        while self.run.left() > 0 and not self.run.is_proven(self.gap):
            if self._is_done():
                return
            if pair_count(self.network) <= _SMALL_PAIRS and self._is_solved_by_marginal(0.5 * self.run.left() + 1.0):
                return
            self._improve(self.run.left() * 0.3 + 1.0)

    def upper(self) -> float:
        """The incumbent's cost in quanta, never too small."""
        if not math.isfinite(self.run.cost):
            return math.inf
        return self.run.cost / self.network.quantum + self.network.rounding

    def offer(self, positions: dict[int, int]) -> None:
        """Hand a choice of the network's nodes to the run."""
        labels = self.network.recover(self.network.labelled(positions))
        if self.run.offer(self.built.choice(labels)):
            self.labels = labels

    def prove(self, quanta: float) -> None:
        """A bound on the network bounds the problem, less what rounding to quanta can hide."""
        if self.network.rounding == 0 and math.isfinite(quanta):
            quanta = math.ceil(quanta - 1e-6 * max(1.0, 1e-6 * abs(quanta)))  # all costs are whole
        self.run.raise_bound(self.network.to_cost(quanta - self.network.rounding))

    def _is_done(self) -> bool:
        if self.network.nodes():
            return False
        self.offer({})
        self.prove(self.network.offset)
        return True

    def _is_solved_without_capacities(self) -> bool:
        relaxed = solve_without_capacities(self.network)
        if relaxed is None:
            return False
        self.prove(relaxed[0])
        if not fits(self.network, relaxed[1]):
            return False
        self.offer(relaxed[1])
        return True

    def _is_solved_by_marginal(self, seconds: float) -> bool:
        deadline = min(self.run.deadline, time.monotonic() + seconds)
        hint = None if self.labels is None else self.network.located(self.labels)
        exact = MarginalSearch(self.network, self.seed, priced_times(self.prices)).run(
            deadline, relative_gap=0.9 * self.gap if self.gap > _PROVEN else 0.0, hint=hint
        )
        if math.isinf(exact.bound) and exact.bound > 0:
            tight = list(exact.tight)
            raise Overfull(self.network.times[tight] if tight else self.network.times)
        self.prove(exact.bound)
        if exact.positions is not None:
            self.offer(exact.positions)
        return self.run.is_proven(self.gap)

    def _choose_first(self) -> None:
        """An incumbent at any cost, so that there is an answer from now on."""
        if self.labels is not None:
            return
        pricing = Pricing(self.network)
        deadline = time.monotonic() + 0.1 * self.run.left()
        positions = choose_until_it_fits(pricing, lambda costs: greedy_positions(pricing, costs), deadline)
        if positions is not None:
            self.offer(dict(zip(pricing.nodes, positions.tolist(), strict=True)))

    def _price(self) -> None:
        """Message passing with prices, dropping what the bound rules out, as long as that pays."""
        while self.run.left() > 0:
            before = pair_count(self.network)
            search = self._priced_search()
            seconds = 0.2 + _PRICE_S_PER_PAIR * before * (1 + before / 500_000)
            budget = time.monotonic() + min(0.3 * self.run.left(), seconds)
            stale = 0
            while time.monotonic() < budget and stale < 2 and not self.run.is_proven(self.gap):
                bound = search.bound
                search.run(_PASSES, deadline=budget, upper=self.upper(), on_choice=self._offer_array(search))
                self.prove(search.bound)
                stale = stale + 1 if search.bound <= bound + 1e-4 * abs(bound) else 0
            if self.run.left() <= 0:
                return
            self._drop(search)
            if pair_count(self.network) > 0.8 * before or not self.network.nodes():
                return

    def _priced_search(self) -> PricedSearch:
        """The one of before, with its messages, as long as the network has not changed."""
        if self.search is None:
            self.search = PricedSearch(self.network, self.prices)
        return self.search

    def _offer_array(self, search: PricedSearch) -> Callable[[Array, float], None]:
        """What a priced search calls with each feasible choice it finds."""

        def offer(positions: Array, cost: float) -> None:
            if cost < self.upper():
                self.offer(dict(zip(search.pricing.nodes, positions.tolist(), strict=True)))

        return offer

    def _drop(self, search: PricedSearch) -> None:
        """Take out the strategies that no better choice uses, and reduce again."""
        self.prices = search.best_prices
        upper = self.upper()
        if not math.isfinite(upper):
            return
        times = self.network.times
        survivors = search.survivors(upper)
        self.prove(search.bound)
        if not survivors:
            return
        self.search = None
        for node, keep in survivors.items():
            if not keep.any():
                raise Deadend
            self.network.restrict(node, keep)
        presolve(self.network, deadline=self.run.deadline)
        self.prices = self.prices[np.isin(times, self.network.times)]

    def _improve(self, seconds: float) -> None:
        """Large-neighbourhood search around the incumbent, then drop what the better incumbent rules out."""
        positions = None if self.labels is None else self.network.located(self.labels)
        deadline = min(self.run.deadline, time.monotonic() + seconds)
        priced = self._priced_search()
        if positions is not None:
            self.rounds += 1
            search = Neighbourhoods(
                self.network,
                positions,
                self.seed + 7919 * self.rounds,
                prices=self.prices,
                regrets=priced.regrets(),
            )
            search.run(deadline, lambda better, _: self.offer(better))
        if self.run.left() <= 0:
            return
        priced.run(_PASSES, deadline=self.run.deadline, upper=self.upper(), on_choice=self._offer_array(priced))
        self._drop(priced)
