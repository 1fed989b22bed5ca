"""The best cut of a chain into stages, exactly: an integer program over all intervals of layers, solved by CP-SAT.

A column is one possible stage: first layer, end, option. The chosen ones are a path from the first layer to the end.
The program holds what a path alone does not see: devices of each kind, the longest stage, and microbatches in flight,
which depend on how many stages follow. Columns that no optimum can hold are dropped first, by bounds from a known cut.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from autopar.search.stage_bounds import least_work, shortest_longest, step_bound
from autopar.search.stage_problem import (
    Cut,
    CutCost,
    StageProblem,
    best_even_cut,
    evaluate_cut,
    infeasible,
)
from autopar.search.stage_ties import least_sent

RESOLUTION = 10**7  # of the best known step
PRECISION = 1e-9  # an answer as near to its bound is the best


@dataclass(frozen=True, slots=True)
class CutSolution:
    """The best cut found, its price, and a proven bound on every cut's `step_s`."""

    cut: Cut
    cost: CutCost
    bound_s: float
    columns: int


@dataclass(frozen=True, slots=True)
class _Column:
    """A possible stage."""

    first: int
    end: int
    option: int
    work_s: float  # of a microbatch; with its sync where that bounds the rate
    sync_s: float
    send_s: float  # both ways
    most_held: int  # microbatches in flight that its memory admits


def solve_cut(
    problem: StageProblem, *, known: Cut | None = None, effort: float = 30.0, gap: float = 0.0
) -> CutSolution:
    """The cut with the least `step_s`, of those one that sends few bytes. `effort` limits CP-SAT's deterministic time;
    the same problem has one answer.

    A cut within `gap` of its bound, as a share, ends the search.
    """
    solution = _solved(problem, known, effort, gap)
    cut = least_sent(problem, solution.cut)
    return replace(solution, cut=cut, cost=evaluate_cut(problem, cut))


def _solved(problem: StageProblem, known: Cut | None, effort: float, gap: float) -> CutSolution:
    balanced, longest_s = shortest_longest(problem)
    start = _best_known(problem, (known, balanced))
    bound_s = step_bound(problem, longest_s)
    if start is not None and start[1].step_s <= bound_s * (1 + max(PRECISION, gap)):
        return CutSolution(*start, min(bound_s, start[1].step_s), 0)
    columns = _undominated(problem, _columns(problem, start[1].step_s if start else math.inf), longest_s)
    solved = _Program(problem, columns, start, longest_s).solve(effort, gap) if columns else None
    if solved is None:
        if start is None:
            raise infeasible(problem)
        return CutSolution(*start, bound_s, len(columns))
    cut, proven_s = solved
    cost = evaluate_cut(problem, cut)
    if start is not None and (cost.violations or start[1].step_s <= cost.step_s):
        cut, cost = start
    return CutSolution(cut, cost, min(max(bound_s, proven_s), cost.step_s), len(columns))


def _best_known(problem: StageProblem, known: tuple[Cut | None, ...]) -> tuple[Cut, CutCost] | None:
    """The best of the even cuts and those given."""
    found = [item for item in (best_even_cut(problem),) if item is not None]
    for cut in known:
        if cut is not None:
            cost = evaluate_cut(problem, cut)
            found += [] if cost.violations else [(cut, cost)]
    return min(found, key=lambda item: item[1].step_s) if found else None


def _columns(problem: StageProblem, known_s: float) -> Iterator[_Column]:
    """Every stage that may be part of a cut better than the known one."""
    least_sum = 0.0 if problem.asynchronous else least_work(problem)
    longest_s = known_s
    if problem.asynchronous or problem.microbatches > 1:
        longest_s = min(known_s, (known_s - least_sum) / (1 if problem.asynchronous else problem.microbatches - 1))
    for number in range(len(problem.options)):
        for first in range(problem.layers):
            yield from _columns_from(problem, number, first, longest_s * (1 + 1e-9) + 1e-15)


def _columns_from(problem: StageProblem, number: int, first: int, longest_s: float) -> Iterator[_Column]:
    option = problem.options[number]
    work_s = np.cumsum(option.work_s[first:])
    sync_s = np.cumsum(option.sync_s[first:])
    fixed, held = np.cumsum(option.fixed_bytes[first:]), np.cumsum(option.activation_bytes[first:])
    if problem.asynchronous:
        work_s = work_s + sync_s
    for place in range(len(work_s)):
        end = first + place + 1
        free = option.memory_bytes * (1 + 1e-9) - fixed[place]
        if work_s[place] > longest_s or free < held[place]:
            break
        last = end == problem.layers
        send_s = 2 * (option.send_latency_s + float(problem.crossing_bytes[end - 1]) / option.send_bytes_per_s)
        if not last and send_s > longest_s:
            continue
        most = math.floor(free / held[place]) if held[place] > 0 else 1 << 30
        if problem.in_flight == "all" and most < problem.microbatches:
            break
        yield _Column(first, end, number, float(work_s[place]), float(sync_s[place]), 0.0 if last else send_s, most)


def _undominated(problem: StageProblem, columns: Iterable[_Column], longest_s: float) -> list[_Column]:
    """Without those that another of the same layers and kind replaces: no more devices, no longer, no less memory.

    Where only the longest stage counts, all that are shorter than every cut's longest are equally short.
    """
    groups: dict[tuple[int, int, str], list[_Column]] = defaultdict(list)
    for column in columns:
        groups[column.first, column.end, problem.options[column.option].kind].append(column)

    def price(it: _Column) -> tuple[float, ...]:
        work_s = max(it.work_s, longest_s) if problem.asynchronous else it.work_s
        sync_s = 0.0 if problem.asynchronous else it.sync_s
        return (problem.options[it.option].devices, work_s, sync_s, it.send_s, -it.most_held)

    kept: list[_Column] = []
    for group in groups.values():
        front: list[tuple[float, ...]] = []
        for column in sorted(group, key=price):
            mine = price(column)
            if not any(all(one <= two for one, two in zip(other, mine, strict=True)) for other in front):
                front.append(mine)
                kept.append(column)
    return kept


class _Program:
    """The integer program."""

    def __init__(
        self, problem: StageProblem, columns: list[_Column], start: tuple[Cut, CutCost] | None, longest_s: float
    ) -> None:
        from ortools.sat.python import cp_model  # loads pandas, which few plans need

        self.problem, self.columns, self.model = problem, columns, cp_model.CpModel()
        most_s = max(max(it.work_s, it.send_s, it.sync_s) for it in columns)
        self.tick_s = (start[1].step_s if start else (most_s or 1.0) * problem.microbatches) / RESOLUTION
        self.least = math.floor(longest_s / self.tick_s)
        self.take = [self.model.new_bool_var(f"{it.first}-{it.end} {it.option}") for it in columns]
        self._path()
        self._devices()
        self._in_flight()
        if problem.in_order:
            self._order()
        self._minimize()
        if start is not None:
            spans = set(start[0].spans())
            for column, take in zip(columns, self.take, strict=True):
                self.model.add_hint(take, (column.first, column.end, column.option) in spans)

    def solve(self, effort: float, gap: float) -> tuple[Cut, float] | None:
        """The best cut and a bound on its seconds; None where no column's path fits."""
        from ortools.sat.python import cp_model  # loads pandas, which few plans need

        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = effort
        solver.parameters.relative_gap_limit = gap
        if solver.solve(self.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        chosen = [it for it, take in zip(self.columns, self.take, strict=True) if solver.value(take)]
        chosen.sort(key=lambda column: column.first)
        cut = Cut(tuple(it.end for it in chosen), tuple(it.option for it in chosen))
        rounding = self.problem.microbatches + self.problem.layers  # half a tick in each number of the objective
        return cut, max(0.0, (solver.best_objective_bound - rounding) * self.tick_s)

    def _path(self) -> None:
        begins, stops = defaultdict(list), defaultdict(list)
        for column, take in zip(self.columns, self.take, strict=True):
            begins[column.first].append(take)
            stops[column.end].append(take)
        self.model.add_exactly_one(begins[0])
        self.model.add_exactly_one(stops[self.problem.layers])
        for place in range(1, self.problem.layers):
            self.model.add(sum(begins[place]) == sum(stops[place]))
            self.model.add_at_most_one(begins[place])
        if self.problem.stages:
            self.model.add(sum(self.take) == self.problem.stages)

    def _devices(self) -> None:
        options = self.problem.options
        for kind, available in self.problem.device_counts:
            used = [options[it.option].devices * take for it, take in zip(self.columns, self.take, strict=True)
                    if options[it.option].kind == kind]  # fmt: skip
            self.model.add(sum(used) <= available)

    def _in_flight(self) -> None:
        """A stage whose memory admits few microbatches in flight has few stages after it."""
        if self.problem.in_flight == "all":
            return
        binding = [it.most_held for it in self.columns
                   if self.problem.asynchronous or it.most_held < self.problem.microbatches]  # fmt: skip
        if not binding or min(binding) >= 2 * self.problem.layers:
            return
        begins = defaultdict(list)
        for column, take in zip(self.columns, self.take, strict=True):
            begins[column.first if self.problem.in_flight == "remaining" else 0].append(take)
        following = [self.model.new_int_var(0, self.problem.layers, f"from {it}") for it in range(self.problem.layers)]
        for place, count in enumerate(following):
            rest = following[place + 1 : place + 2] if self.problem.in_flight == "remaining" else []
            self.model.add(count == sum(begins[place if self.problem.in_flight == "remaining" else 0]) + sum(rest))
        for column, take in zip(self.columns, self.take, strict=True):
            if not self.problem.asynchronous and column.most_held >= self.problem.microbatches:
                continue
            most = column.most_held
            if self.problem.in_flight == "twice the stages":
                most = (most + 1) // 2
            if most < self.problem.layers:
                self.model.add(following[column.first] <= most).only_enforce_if(take)

    def _order(self) -> None:
        """A stage on the n-th kind of device has n before it."""
        kinds = [kind for kind, _ in self.problem.device_counts]
        begins = defaultdict(list)
        for column, take in zip(self.columns, self.take, strict=True):
            begins[column.first].append(take)
        number = 0
        for place in range(self.problem.layers):
            for column, take in zip(self.columns, self.take, strict=True):
                if column.first == place:
                    own = kinds.index(self.problem.options[column.option].kind)
                    self.model.add(number == own).only_enforce_if(take)
            number = number + sum(begins[place])
        self.model.add(number == len(kinds))

    def _minimize(self) -> None:
        total = sum(self._ticks(it.work_s) + self._ticks(it.send_s) for it in self.columns)
        longest = self.model.new_int_var(min(self.least, total), total, "longest")
        sync = self.model.new_int_var(0, total, "sync")
        filling = []
        for column, take in zip(self.columns, self.take, strict=True):
            bound = max(self._ticks(column.work_s), self._ticks(column.send_s))
            self.model.add(longest >= bound * take)
            filling.append((self._ticks(column.work_s) + self._ticks(column.send_s)) * take)
            if not self.problem.asynchronous and column.sync_s > 0:
                self.model.add(sync >= self._ticks(column.sync_s) * take)
        if self.problem.asynchronous:
            self.model.minimize(longest)
        else:
            self.model.minimize((self.problem.microbatches - 1) * longest + sum(filling) + sync)

    def _ticks(self, seconds: float) -> int:
        return round(seconds / self.tick_s)
