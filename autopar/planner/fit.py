"""Layouts made to fit a memory limit by recomputing and packing: the problem proposes, the emitted program is
measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.errors import InfeasibleProblemError
from autopar.passes.packings import PACKED
from autopar.planner.budget import Budget
from autopar.planner.build import PlanningProblem
from autopar.planner.cheapest_first import CheapestFirst
from autopar.planner.measure import Measured, measured_program
from autopar.planner.moves_again import MovesAgain
from autopar.planner.packed_values import PackedValues, Packing
from autopar.planner.prices import Prices
from autopar.planner.recomputation import Recomputation, with_gathers
from autopar.planner.residency import USUAL, Residency
from autopar.planner.saved_values import SavedValues, is_view
from autopar.search import Problem, evaluate, solve

Array = npt.NDArray[np.float64]
ROUNDS = 6  # of solving and measuring
LEVELS = 4  # narrow cuts of the forward before its own first reader at which a value may be recomputed
GAP = 1e-3  # of the whole step: a better answer is not worth the search
BISECTIONS = 6  # in search of the least memory
SLACK = 0.01  # of the limit: a plan that leaves less unused is not tried again


@dataclass(frozen=True)
class Fitted:
    """What becomes of values, and what the emitted program then holds."""

    residency: Residency
    seconds: float  # that this takes more than the usual residency; less than none where copies are kept
    measured: Measured


@dataclass
class Fit:
    """Chooses what to recompute and what to pack under one choice of layouts.

    `step_s`: seconds of the step as it is. `pins`: the residencies that are asked for, by decision. `residency`: the
    one so far.
    """

    planning: PlanningProblem
    choice: Sequence[int]
    prices: Prices
    step_s: float
    pins: Mapping[int, str]
    budget: Budget
    packing: Packing
    residency: Residency = USUAL
    seed: int = 0

    @cached_property
    def saved(self) -> SavedValues:
        """What there is to keep or to recompute."""
        also = self.residency.recomputed | self.residency.words.keys() | self.pins.keys()
        return SavedValues(self.planning.decisions, LEVELS, also)

    @cached_property
    def packed(self) -> PackedValues:
        """What there is to pack."""
        others = {*self.pins.values(), *self.residency.words.values()} & {*PACKED}
        return PackedValues(self.saved, self.packing, frozenset(others))

    @cached_property
    def moves(self) -> MovesAgain:
        """What there is to move again."""
        return self.planning.moves(self.choice, self.prices)

    @cached_property
    def of(self) -> Recomputation:
        """The search problem."""
        decisions, shape = self.planning.decisions, self.planning.mesh_shape
        return Recomputation(self.saved, decisions, self.choice, shape, self.moves, self.pins, self.packed)

    @cached_property
    def fastest(self) -> Residency:
        """The residency where memory does not matter: nothing recomputed but what is pinned, and copies kept, but those
        of parameters on the host."""
        decisions = self.planning.decisions
        again = {index for index, pin in self.pins.items() if pin == "recompute" and decisions[index].kind == "op"}
        given = self.of.given
        kept = {index for index in self.moves.gathers if self.pins.get(index) != "recompute" and index not in given}
        recomputed = self.saved.closed(again) if again else frozenset()
        own = Residency(recomputed, packed=self._pinned, hosted=given)
        return with_gathers(own, self.moves.gathers, kept)

    @property
    def _pinned(self) -> frozenset[tuple[int, str]]:
        """What is to be packed."""
        ops = {index: pin for index, pin in self.pins.items() if self.planning.decisions[index].kind == "op"}
        return frozenset((index, pin) for index, pin in ops.items() if pin in PACKED)

    @cached_property
    def least_s(self) -> float:
        """Seconds that the fastest residency takes more than the usual one."""
        return self.seconds(self.fastest)

    @cached_property
    def checkpointed(self) -> Residency:
        """Only what crosses a narrow cut of the forward is kept, and parameters are on the host: measured, it shows how
        little the rest may hold."""
        pinned = {index for index, pin in self.pins.items() if pin != "recompute"}
        again = self.saved.values.keys() - self.saved.checkpoints - pinned
        kept = self.moves.gathers.keys() & pinned
        hosted = self.of.given | {*self.of.open}
        own = Residency(self.saved.closed(again), packed=self._pinned, hosted=hosted)
        return with_gathers(own, self.moves.gathers, kept)

    def measured(self, residency: Residency) -> Fitted:
        """What the emitted program then holds."""
        return Fitted(residency, self.seconds(residency), measured_program(self.planning, self.choice, residency))

    def seconds(self, residency: Residency) -> float:
        """Seconds that a residency takes more than the usual one, moves included."""
        if residency == USUAL:
            return 0.0
        states = self.of.states(residency) if residency.recomputed else {}
        active = {index for index, state in states.items() if isinstance(state, int)}
        again = sum(
            float(self.planning.decisions[index].seconds[self.choice[index]])
            for index in sorted(active)
            if self.saved.values[index].is_read_forward
        )
        views = {index for index in residency.recomputed if is_view(self.planning.decisions[index])}
        views |= residency.recomputed & self.moves.experts.keys()
        changed = Residency(frozenset(active | views), residency.gathered_once)
        packing = sum(self.packed.seconds(index, word, self.choice[index]) for index, word in sorted(residency.packed))
        hosting = self.packing.hosting
        hosted = sum(hosting.seconds(index, self.choice[index]) for index in sorted(residency.hosted))
        return again + packing + hosted + self.moves.backward(changed) - self.moves.backward(USUAL)

    def recompute_s(self, residency: Residency) -> float:
        """Seconds spent on recomputing: over the same residency with nothing recomputed."""
        kept = {index for index, gather in self.moves.gathers.items() if gather.is_kept(residency)}
        kept |= self.moves.experts.keys()
        same = with_gathers(Residency(packed=residency.packed, hosted=residency.hosted), self.moves.gathers, kept)
        return self.seconds(residency) - self.seconds(same) if residency != same else 0.0

    def problem(self, fitted: Fitted) -> Problem:
        """What recomputing under these layouts costs and holds, calibrated on a measured program; without a limit."""
        return self.of.problem(np.maximum(self.beside(fitted), 0.0), None)[0]

    def under(self, limit: int, start: Fitted, *, rounds: int = ROUNDS) -> tuple[Fitted | None, Fitted]:
        """(The cheapest that was found to fit, the thriftiest that was found), begun from a measured program."""
        best: Fitted | None = start if start.measured.peak_bytes <= limit else None
        if best is not None and self._is_near(best.seconds):
            return best, best
        thriftiest, last = start, start
        constant = self.beside(start)
        tried = {start.residency}
        for _ in range(rounds):
            found = self._proposed(constant, limit, tried)
            if found in tried:
                break
            tried.add(found)
            last = self.measured(found)
            thriftiest = min(thriftiest, last, key=lambda item: item.measured.peak_bytes)
            fits = last.measured.peak_bytes <= limit
            if fits and (best is None or last.seconds < best.seconds):
                best = last
            if fits and (self._is_near(last.seconds) or last.measured.peak_bytes >= (1 - SLACK) * limit):
                break
            if fits and self.budget.is_spent:
                break
            fresh = self.beside(last)
            constant = fresh if fits or found == self.checkpointed else np.maximum(constant, fresh)
        return best, thriftiest

    def thriftiest(self, start: Fitted) -> Fitted:
        """The least memory that recomputing was found to lead to, by bisection of the limit."""
        best = start
        low, high = 0, start.measured.peak_bytes
        for _ in range(BISECTIONS):
            middle = (low + high) // 2
            fitted, thrifty = self.under(middle, best, rounds=2)
            best = min(best, thrifty, key=lambda item: item.measured.peak_bytes)
            if fitted is None:
                low = middle
            high = min(high, best.measured.peak_bytes)
            if high - low <= SLACK * high:
                break
        return best

    def beside(self, fitted: Fitted) -> Array:
        """What the emitted program holds beside its saved values, [decision, 2]: while values are recomputed for a
        decision (where none are, just before it runs), and while it runs."""
        measured, count = fitted.measured, len(self.planning.decisions)
        beside = measured.totals - self.of.held(fitted.residency, measured.moments)
        time, step = np.divmod(measured.moments, count + 1)
        constant = np.full((count, 2), -np.inf)
        np.maximum.at(constant, (time, (step == count).astype(np.int64)), beside)
        times, first = np.unique(time, return_index=True)
        entering = measured.before[first] - self.of.held(fitted.residency, times * (count + 1))
        constant[times, 0] = np.where(constant[times, 0] == -np.inf, entering, constant[times, 0])
        for index in range(count):  # decisions without a node of their own
            constant[index] = np.where(
                constant[index] == -np.inf, constant[index - 1] if index else 0.0, constant[index]
            )
        return constant

    def _is_near(self, seconds: float) -> bool:
        """Whether a search could gain next to nothing: a residency takes hardly more than the fastest."""
        return seconds - self.least_s <= GAP * self.step_s

    def _proposed(self, constant: Array, limit: float, tried: Set[Residency]) -> Residency:
        """What to try next: the cheapest values dropped first where that is near the best possible, else a search."""
        first = CheapestFirst(self.of).under(constant, limit)
        if first is not None and first not in tried and self._is_near(self.seconds(first)):
            return first
        found = self._solved(constant, limit, {*tried, *([first] if first else []), self.checkpointed})
        return found or (first if first not in tried else None) or self.checkpointed

    def _solved(self, constant: Array, limit: float, known: Set[Residency]) -> Residency | None:
        problem, states = self.of.problem(constant, limit)
        whole = _with_node(problem, self.step_s)  # so that the gap is one of the step
        starts = [self.of.picks(residency, states, len(whole.costs)) for residency in known]
        costs = {start: evaluate(whole, start) for start in starts if start is not None}
        start = min((start for start, cost in costs.items() if np.isfinite(cost)), key=costs.__getitem__, default=None)
        try:
            solution = solve(whole, time_limit_s=self.budget.share_s, seed=self.seed, start=start, gap=GAP)
        except InfeasibleProblemError:
            return None
        if not np.isfinite(solution.cost):
            return None
        return self.of.residency(solution.choice, states)


def _with_node(problem: Problem, cost: float) -> Problem:
    """The problem with one more node, which has no choice."""
    return replace(
        problem,
        costs=(*problem.costs, np.array([cost])),
        usages=(*problem.usages, np.zeros(1)),
        intervals=(*problem.intervals, (0, 0)),
        groups=None,
    )
