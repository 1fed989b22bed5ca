"""The least that recomputing can cost, whatever the schedule: Checkmate's problem (Jain et al., MLSys 2020, eq. 1).

Wherever the backward of a layer reads saved values, a stage ends. At every stage each value of the forward is held or
not (S), and is computed again or not (R), as often as one likes; seconds and bytes are those of the planner's own
problem, and what the rest of the program holds is what the emitted program was measured to hold. The backward runs
once, and what is computed again for a stage runs in the program's order. The rest is relaxed, so that no schedule costs
less than what is proven here: the forward's memory is not limited, and while values are computed again, only what
surely is there counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopar.planner.fit import Fit, Fitted
from autopar.planner.residency import Residency
from autopar.planner.saved_values import KEEP, late_decisions, roots_of
from autopar.search.mathopt import LinearModel, solve_linear

Array = npt.NDArray[np.float64]
Moment = tuple[float, frozenset[int]]
Row = list[tuple[int, float]]
"""Columns, each with its factor."""
UNIT = 1e6  # bytes: what rows count in
GAP = 1e-3  # of the overhead: a proof that is so near is good enough


@dataclass(frozen=True)
class Again:
    """Computing a value of the forward again: seconds, the bytes it holds, the values it is computed from.

    `moments`: on the way to it, (bytes that are made, values that are read).
    """

    seconds: float
    bytes: float
    parents: frozenset[int]
    moments: tuple[Moment, ...]


@dataclass
class Stage:
    """What the backward reads before the next stage.

    `time`: its first decision. `before`: the most bytes beside saved values since the last stage; `again`: those while
    values are computed again for this one. `reads`: (values, bytes beside them); the first reads all that others do.
    """

    time: int
    before: float
    again: float
    reads: list[tuple[frozenset[int], float]]


@dataclass(frozen=True)
class Optimum:
    """No schedule takes less than `bound` seconds beside the step; `best`: the least that was seen, inf if none."""

    bound: float
    best: float


def proven_optimum(fit: Fit, known: Iterable[Fitted], limit: float, time_limit_s: float) -> Optimum:
    """What recomputing costs at the least under a limit in bytes, on one device.

    `known`: measured programs. The least that any of them holds beside saved values counts; the cheapest that fits is
    where the solver starts.
    """
    known = list(known)
    constant = np.minimum.reduce([fit.beside(item) for item in known])
    stages = stages_of(fit, constant)
    direct = frozenset(index for stage in stages for index in stage.reads[0][0])
    rows = _Rows(passing_joined(values_of(fit), direct), stages, limit / UNIT)
    model = rows.model()
    fitting = [item for item in known if item.measured.peak_bytes <= limit]
    best = min(fitting, key=lambda item: item.seconds, default=None)
    hint = None if best is None else rows.picks(fit, best.residency)
    answer = solve_linear(model, time_limit_s=time_limit_s, relative_gap=GAP, hint=hint)
    return Optimum(max(0.0, answer.bound), answer.cost)


def least_bytes(fit: Fit, measured: Fitted) -> float:
    """What no schedule of recomputation can do without: what one op of the backward reads, and what is held beside."""
    stages = stages_of(fit, fit.beside(measured))
    held = (sum(fit.of.bytes[it] for it in read) + beside * UNIT for stage in stages for read, beside in stage.reads)
    return max(held, default=0.0)


def values_of(fit: Fit) -> dict[int, Again]:
    """The saved values of a fit, by decision."""
    parents: dict[int, set[int]] = {index: set() for index in fit.saved.values}
    for index, value in fit.saved.values.items():
        for reader in value.readers:
            parents[reader].add(index)
    found = {}
    for index, own in parents.items():
        held = fit.of.bytes[index] / UNIT
        found[index] = Again(fit.of.seconds[index], held, frozenset(own), ((held, frozenset(own)),))
    return found


def passing_joined(values: Mapping[int, Again], direct: frozenset[int]) -> dict[int, Again]:
    """Without what only one other value is computed from, and is no smaller: holding that other one is as good."""
    found = dict(values)
    for index in sorted(values):
        readers = [reader for reader, value in found.items() if index in value.parents]
        if index in direct or len(readers) != 1 or found[index].bytes < found[readers[0]].bytes:
            continue
        own, reader = found.pop(index), found[readers[0]]
        moments = tuple((made + own.bytes * (index in read), read - {index}) for made, read in reader.moments)
        parents = (reader.parents - {index}) | own.parents
        found[readers[0]] = Again(own.seconds + reader.seconds, reader.bytes, parents, own.moments + moments)
    return found


def stages_of(fit: Fit, constant: Array) -> list[Stage]:
    """The stages of the backward, in order. `constant`: as of `Fit.beside`."""
    decisions, stages, before = fit.planning.decisions, list[Stage](), 0.0
    roots = roots_of(decisions)
    for time, late in enumerate(late_decisions(decisions)):
        if not late:
            continue
        again, running = (constant[time] / UNIT).tolist()
        before = max(before, again)
        read = frozenset(roots[source.decision] for source in decisions[time].sources) & fit.saved.values.keys()
        if not read:
            before = max(before, running)
        elif stages and read <= stages[-1].reads[0][0] and decisions[time].module == decisions[stages[-1].time].module:
            stages[-1].reads.append((read, running))
        else:
            stages.append(Stage(time, before, again, [(read, running)]))
            before = 0.0
    return stages


@dataclass
class _Rows:
    """The rows of the linear model; `limit` and all bytes in `UNIT`s."""

    values: dict[int, Again]
    stages: Sequence[Stage]
    limit: float
    costs: list[float] = field(default_factory=list)
    held: dict[tuple[int, int], int] = field(default_factory=dict)  # by stage and value: the column of S
    again: dict[tuple[int, int], int] = field(default_factory=dict)  # the same of R
    rows: list[tuple[Row, float, float]] = field(default_factory=list)

    def model(self) -> LinearModel:
        lasts = self._lasts()
        for stage in range(len(self.stages)):
            for index in (it for it, last in lasts.items() if last >= stage):
                self.held[stage, index], self.again[stage, index] = len(self.costs), len(self.costs) + 1
                self.costs += [0.0, self.values[index].seconds]
        for stage in range(len(self.stages)):
            self._follow(stage)
            self._hold(stage)
        triplets = [(row, *pair) for row, (pairs, _, _) in enumerate(self.rows) for pair in pairs]
        rows, columns, factors = (np.array(part) for part in zip(*triplets, strict=True))
        count = len(self.costs)
        lower, upper = (np.array(part) for part in zip(*((low, high) for _, low, high in self.rows), strict=True))
        ones = np.ones(count)
        return LinearModel(
            np.array(self.costs), ones, ones.astype(bool), rows, columns, factors.astype(np.float64), lower, upper
        )

    def picks(self, fit: Fit, residency: Residency) -> Array:
        """A residency as a point of the model."""
        point, states = np.zeros(len(self.costs)), fit.of.states(residency)
        start = {index: state for index, state in states.items() if isinstance(state, int) and index in self.values}
        first = {index: self._stage_at(time) for index, time in start.items()}
        ends = self._lasts(first)
        for index in self.values:
            if index in first:
                point[self.again[first[index], index]] = 1.0
            begin = first[index] + 1 if index in first else 0 if states[index] == KEEP else len(self.stages)
            for stage in range(begin, ends.get(index, -1) + 1):
                point[self.held[stage, index]] = 1.0
        return point

    def _stage_at(self, time: int) -> int:
        return next(number for number, stage in enumerate(self.stages) if stage.time >= time)

    def _lasts(self, again: Mapping[int, int] | None = None) -> dict[int, int]:
        """The last stage at which each value is needed; `again`: when others are computed from it, any time if None."""
        lasts = {index: number for number, stage in enumerate(self.stages) for index in stage.reads[0][0]}
        lasts = {index: last for index, last in lasts.items() if index in self.values}
        for index in sorted(self.values, reverse=True):
            until = lasts.get(index, -1) if again is None else again.get(index, -1)
            for parent in self.values[index].parents:
                lasts[parent] = max(lasts.get(parent, -1), until)
        return lasts

    def _follow(self, stage: int) -> None:
        """What is read is there, and so is what others are computed from; what is held was there before."""
        for index, value in self.values.items():
            if (stage, index) not in self.held:
                continue
            there = [(self.held[stage, index], 1.0), (self.again[stage, index], 1.0)]
            self.rows.append((there, float(index in self.stages[stage].reads[0][0]), 1.0))
            absent = [(column, -1.0) for column, _ in there]
            if (stage + 1, index) in self.held:
                self.rows.append(([(self.held[stage + 1, index], 1.0), *absent], -np.inf, 0.0))
            for parent in value.parents:
                source = [(self.held[stage, parent], -1.0), (self.again[stage, parent], -1.0)]
                self.rows.append(([(self.again[stage, index], 1.0), *source], -np.inf, 0.0))

    def _hold(self, stage: int) -> None:
        """The memory before a stage, while values are computed again for it, and while the backward reads them."""
        own = self.stages[stage]
        entering = [(column, self.values[index].bytes) for (at, index), column in self.held.items() if at == stage]
        self.rows.append((entering, -np.inf, self.limit - own.before))
        later = {index: column for (at, index), column in self.held.items() if at == stage + 1}
        for read, beside in own.reads:
            self._limit(self._beside(later, read), beside + sum(self.values[index].bytes for index in read))
        least = min(own.again, min(beside for _, beside in own.reads))
        for index in self.values:
            if (stage, index) in self.again:
                self._hold_again(stage, index, later, least)

    def _beside(self, later: Mapping[int, int], without: Iterable[int]) -> Row:
        left = later.keys() - set(without)
        return [(later[index], self.values[index].bytes) for index in sorted(left)]

    def _hold_again(self, stage: int, index: int, later: Mapping[int, int], beside: float) -> None:
        """While a value is computed again: it, what it is computed from, and what of before it is held for later."""
        reads = self.stages[stage].reads[0][0]
        for made, parents in self.values[index].moments:
            before = {it for it in self.values if it < min([index, *parents])} | ({*parents} & reads)
            sure = sum(self.values[it].bytes for it in before & reads)
            needed = made + sum(self.values[it].bytes for it in parents - reads)
            rest = {it: column for it, column in later.items() if it in before and it not in reads | parents}
            row = self._beside(rest, ())
            self._limit([*row, (self.again[stage, index], needed)], beside + sure)

    def _limit(self, row: Row, beside: float) -> None:
        """A row that may be broken: the bytes of what is held, at the most."""
        if sum(factor for _, factor in row) > self.limit - beside:
            self.rows.append((row, -np.inf, self.limit - beside))
