"""The `ilp` strategy, in the order in which it happens: reduce, relax and walk, solve exactly, improve."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from autopar.errors import InfeasibleProblemError
from autopar.search.anytime import Anytime, Observer
from autopar.search.build import Built, build_network, tight_interval
from autopar.search.exact import MarginalSearch, fits, pair_count, priced_times, solve_without_capacities
from autopar.search.neighbourhood import Neighbourhoods
from autopar.search.network import Array, Network
from autopar.search.presolve import DOMINANCE_CELLS, Deadend, Overfull, presolve
from autopar.search.problem import Problem
from autopar.search.relaxation import Relaxation, as_positions
from autopar.search.solution import Solution

_SMALL_PAIRS = 150_000  # the marginal ILP of so many pairs is worth trying at once
_TINY_PAIRS = 3_000  # and of so many, without prices first
_PROVEN = 1e-9  # a relative gap that is rounding
_STALE_ROUNDS = 3  # rounds of a large network that barely raise the bound, until it is taken as it is
_WORTH_DROPPING = 0.1  # share of a large network's strategies: less does not pay for starting over
_PASSES = 5  # double passes of message passing during one such round: the bound rises slowly by now
_UNTIL_THE_END = 10**9  # moves: the clock ends the walk
_ROUND_S = 6.0  # seconds of neighbourhoods and of walking between two exchanges


def solve_by_ilp(
    problem: Problem,
    time_limit_s: float,
    seed: int,
    *,
    start: Sequence[int] | None = None,
    gap: float = 0.0,
    observer: Observer | None = None,
    dominance_cells: int = DOMINANCE_CELLS,
) -> Solution:
    """Reduce, then solve exactly; after the time limit, the best feasible choice seen and the bound proven by then.

    `dominance_cells`: as in `presolve`, of the first reductions; a good `start` makes dominance tests superfluous.
    Raises `InfeasibleProblemError` where no choice is feasible. Ctrl-C ends the search, not the answer.
    """
    run = Anytime(problem, "ilp", time_limit_s, observer)
    if start is not None:
        run.offer(start)
    built = build_network(problem)
    search: _IlpSearch | None = None
    try:
        presolve(built.network, deadline=run.deadline, dominance_cells=dominance_cells)
        search = _IlpSearch(run, built, seed, gap)
        search.run_all()
    except Deadend:
        _note_nothing_better(run, InfeasibleProblemError("no choice avoids every forbidden strategy and pair"))
    except Overfull as full:
        _note_nothing_better(run, tight_interval(problem, full.times))
    except KeyboardInterrupt:
        pass
    finally:
        if search is not None:
            search.close()
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
        self.relaxation: Relaxation | None = None  # of the network as it is
        self.neighbourhoods: Neighbourhoods | None = None
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
        while not self._is_over():
            self._relax()
            if self._is_over() or self._drop():
                continue
            if self._is_small() and self._is_solved_by_marginal(0.5 * self.run.left() + 1.0):
                return
            self._improve(self.run.left() * 0.3 + 1.0)

    def close(self) -> None:
        """End what runs beside us."""
        if self.relaxation is not None:
            self.relaxation.close()

    def _is_over(self) -> bool:
        return self.run.left() <= 0 or self._is_proven() or self._is_done()

    def _is_proven(self) -> bool:
        """Within the gap asked for, or as near as rounding to quanta lets anything be proven."""
        hidden = 2.0 * self.network.to_cost(self.network.rounding)
        return self.run.is_proven(self.gap) or self.run.cost - self.run.bound <= hidden

    def _is_small(self) -> bool:
        return pair_count(self.network) <= _SMALL_PAIRS

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
        return self._is_proven()

    def _relax(self) -> None:
        """Rounds of bounding and walking, until the bound hardly moves."""
        patience = 1 if self._is_small() else _STALE_ROUNDS
        relaxation = self._relaxed()
        while relaxation.stale < patience and self.run.left() > 0 and not self._is_proven():
            relaxation.round(self.upper())
            self._report(relaxation)

    def _relaxed(self) -> Relaxation:
        """The one of before, with its messages, as long as the network has not changed."""
        if self.relaxation is None:
            located = None if self.labels is None else self.network.located(self.labels)
            self.relaxation = Relaxation(self.network, self.prices, self.seed, self.run.deadline)
            if located is not None:
                self.relaxation.take(as_positions(self.relaxation.pricing, located))
        return self.relaxation

    def _report(self, relaxation: Relaxation) -> None:
        self.prove(relaxation.priced.bound)
        located = relaxation.located()
        if located is not None and relaxation.cost < self.upper():
            self.offer(located)

    def _drop(self) -> bool:
        """Take out the strategies that no better choice uses, and reduce again; whether that was worth it."""
        relaxation, upper = self._relaxed(), self.upper()
        self.prices = relaxation.priced.best_prices
        if not math.isfinite(upper):
            return False
        survivors = relaxation.priced.survivors(upper)
        self.prove(relaxation.priced.bound)
        lost = sum(int((~keep).sum()) for keep in survivors.values())
        before = len(relaxation.pricing.unary)
        if not lost or (lost < _WORTH_DROPPING * before and not self._is_small()):
            return False
        self._restart(survivors)
        return sum(self.network.size(node) for node in self.network.nodes()) <= (1 - _WORTH_DROPPING) * before

    def _restart(self, survivors: dict[int, Array]) -> None:
        """Reduce the network to the survivors."""
        self.close()
        self.relaxation = self.neighbourhoods = None
        times = self.network.times
        for node, keep in survivors.items():
            if not keep.any():
                raise Deadend
            self.network.restrict(node, keep)
        presolve(self.network, deadline=self.run.deadline)
        self.prices = self.prices[np.isin(times, self.network.times)]

    def _improve(self, seconds: float) -> None:
        """Large-neighbourhood search here, a walk on the other core; each takes over what the other finds."""
        relaxation = self._relaxed()
        deadline = min(self.run.deadline, time.monotonic() + seconds)
        while time.monotonic() < deadline and not self._is_proven():
            end = min(deadline, time.monotonic() + _ROUND_S)
            relaxation.begin_walk(moves=_UNTIL_THE_END, end=end)
            located = relaxation.located()
            if located is None:
                relaxation.bound_until(end, self.upper())
            else:
                relaxation.priced.run(_PASSES, deadline=end, upper=self.upper())
                self._search_around(relaxation, located, end)
            relaxation.end_walk()
            self._report(relaxation)

    def _search_around(self, relaxation: Relaxation, located: dict[int, int], end: float) -> None:
        if self.neighbourhoods is None:
            prices, beliefs = relaxation.priced.best_prices, relaxation.priced.regrets()
            self.neighbourhoods = Neighbourhoods(self.network, located, self.seed, prices=prices, regrets=beliefs)
        search = self.neighbourhoods
        search.take(located)
        while time.monotonic() < end:
            search.step(min(self.run.deadline, end + _ROUND_S))
        if search.cost < relaxation.cost:
            relaxation.take(as_positions(relaxation.pricing, search.positions))
