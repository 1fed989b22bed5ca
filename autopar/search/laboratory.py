"""Many strategies on many problems: one record for each pair, as a table, as CSV, and as a plot."""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from autopar.errors import AutoparError
from autopar.plots import new_figure, save_figure
from autopar.search.problem import Problem
from autopar.search.progress import number, percent
from autopar.search.registry import Strategy, solve
from autopar.search.solution import Solution


@dataclass(frozen=True, slots=True)
class Record:
    """What one strategy did on one problem."""

    problem: str
    strategy: str
    cost: float
    bound: float
    gap: float
    seconds: float
    cpu_s: float
    trace: tuple[tuple[float, float, float], ...]
    error: str = ""

    def seconds_to_within(self, share: float, of: float) -> float:
        """When the incumbent first came within `share` of a cost; inf if it never did."""
        near = of + share * abs(of)
        return next((seconds for seconds, cost, _ in self.trace if cost <= near), math.inf)


def compare(
    problems: Sequence[tuple[str, Problem]],
    strategies: Sequence[tuple[str, str | Strategy]],
    *,
    time_limit_s: float,
    seed: int = 0,
    on_record: Callable[[Record], None] | None = None,
) -> list[Record]:
    """Run every strategy on every problem, one after the other."""
    records = []
    for problem_name, problem in problems:
        for name, strategy in strategies:
            record = _run(problem_name, problem, name, strategy, time_limit_s, seed)
            records.append(record)
            if on_record is not None:
                on_record(record)
    return records


def _run(
    problem_name: str, problem: Problem, name: str, strategy: str | Strategy, time_limit_s: float, seed: int
) -> Record:
    started, cpu = time.perf_counter(), time.process_time()
    try:
        solution = solve(problem, strategy=strategy, time_limit_s=time_limit_s, seed=seed)
        error = ""
    except AutoparError as failure:
        solution, error = Solution((), math.inf), f"{type(failure).__name__}: {failure.what}"
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    trace = (*solution.trace, (seconds, solution.cost, solution.bound))
    return Record(problem_name, name, solution.cost, solution.bound, solution.gap, seconds, cpu_s, trace, error)


def best_costs(records: Sequence[Record]) -> dict[str, float]:
    """The least cost that any strategy reached, per problem."""
    best: dict[str, float] = {}
    for record in records:
        best[record.problem] = min(record.cost, best.get(record.problem, math.inf))
    return best


def to_table(records: Sequence[Record]) -> Table:
    """A rich table, the best cost of each problem marked."""
    best = best_costs(records)
    table = Table("problem", "strategy", "cost", "bound", "gap", "to 1 %", "seconds", "CPU s", box=None, padding=(0, 1))
    for column in table.columns:
        column.overflow = "fold"  # on a narrow screen nothing is left out
    for record in records:
        mark = "[bold]" if record.cost == best[record.problem] and math.isfinite(record.cost) else ""
        within = record.seconds_to_within(0.01, best[record.problem])
        table.add_row(
            record.problem,
            record.strategy,
            record.error or mark + _short(record.cost),
            _short(record.bound),
            percent(record.cost, record.bound),
            f"{within:.1f} s" if math.isfinite(within) else "-",
            f"{record.seconds:.1f}",
            f"{record.cpu_s:.1f}",
        )
    return table


def _short(value: float) -> str:
    """All digits of a whole number, six significant ones of another."""
    return number(value) if value.is_integer() else number(float(f"{value:.6g}"))


def save_csv(records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    """One line per record; numbers in full."""
    best = best_costs(records)
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["problem", "strategy", "cost", "bound", "gap", "seconds_to_1_percent", "seconds", "cpu_s", "error"]
        )
        for record in records:
            within = record.seconds_to_within(0.01, best[record.problem])
            writer.writerow(
                [
                    record.problem,
                    record.strategy,
                    repr(record.cost),
                    repr(record.bound),
                    repr(record.gap),
                    f"{within:.3f}",
                    f"{record.seconds:.3f}",
                    f"{record.cpu_s:.3f}",
                    record.error,
                ]
            )


def save_plot(records: Sequence[Record], path: str | os.PathLike[str]) -> None:
    """Incumbents over time, one panel per problem, as a PNG; needs matplotlib."""
    names = list(dict.fromkeys(record.problem for record in records))
    figure = new_figure(6, 3.2 * len(names))
    for panel, name in enumerate(names):
        axes = figure.add_subplot(len(names), 1, panel + 1)
        for record in (record for record in records if record.problem == name):
            points = [(seconds, cost) for seconds, cost, _ in record.trace if math.isfinite(cost)]
            if points:
                axes.step([x for x, _ in points], [y for _, y in points], where="post", label=record.strategy)
        axes.set(title=name, xlabel="seconds", ylabel="cost of the incumbent", xscale="log", yscale="log")
        if axes.has_data():
            axes.legend(fontsize="small")
    save_figure(figure, path)
