"""The sub-commands `solve` and `bench-search` of `python -m autopar`."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from autopar.search.evaluation import violations
from autopar.search.laboratory import Record, compare, save_csv, save_plot, to_table
from autopar.search.native_output import native_output_on_stderr
from autopar.search.problem import Problem
from autopar.search.progress import ProgressLine, number, percent
from autopar.search.registry import solve, strategy_names
from autopar.search.solution import Solution


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-commands; each sets `run`, a function of the parsed arguments that returns the exit status."""
    _add_solve(subparsers)
    _add_bench(subparsers)


def _add_solve(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "solve",
        help="solve a search problem (contest JSON, .gz too)",
        epilog="example: autopar solve problem.json --time-limit 60 --print-choice",
    )
    parser.add_argument("problem", type=Path, help="the problem's file")
    parser.add_argument("--strategy", default="ilp", help=f"one of: {', '.join(strategy_names())}")
    parser.add_argument(
        "--time-limit", type=float, default=60.0, metavar="SECONDS", help="for everything, starting and reading too"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gap", type=float, default=0.0, help="stop when proven within this share of the cost")
    parser.add_argument("--print-choice", action="store_true", help="print the choice as one bracketed list, last")
    parser.set_defaults(run=run_solve)


def _add_bench(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench-search",
        help="compare search strategies on problems",
        epilog="example: autopar bench-search problem.json --strategies ilp,greedy --time-limit 10",
    )
    parser.add_argument("problems", type=Path, nargs="+", help="files of problems")
    parser.add_argument("--strategies", default="all", help="all, or names with commas between them")
    parser.add_argument("--time-limit", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, default=Path("bench-search.csv"), help="where the records go")
    parser.add_argument("--plot", type=Path, default=None, metavar="PNG", help="where the plot goes (matplotlib)")
    parser.set_defaults(run=run_bench)


def run_solve(args: argparse.Namespace) -> int:
    """Solve one problem: the live line on stderr, the answer on stdout. Status 1: no feasible choice was found.

    The time limit counts from the start of the process: loading Python, and reading the problem, are part of it.
    """
    began = time.monotonic() - args.age_s
    reading = time.monotonic()
    problem = Problem.load(args.problem)
    reading = time.monotonic() - reading
    spent = time.monotonic() - began
    with ProgressLine(Console(stderr=True)) as line, native_output_on_stderr():
        solution = solve(
            problem,
            strategy=args.strategy,
            time_limit_s=max(0.0, args.time_limit - spent - _ending_s(reading, args.time_limit)),
            seed=args.seed,
            gap=args.gap,
            observer=line,
        )
    broken = violations(problem, solution.choice)
    if args.json:
        print(json.dumps(_as_json(solution, spent, broken)))
        return 1 if broken else 0
    print(f"strategy {solution.strategy}, {solution.seconds:.1f} s")
    print(f"cost     {number(solution.cost)}")
    print(f"bound    {number(solution.bound)}")
    print(f"gap      {percent(solution.cost, solution.bound)}")
    if broken:
        print(f"no feasible choice found; the nearest breaks {len(broken)} rules, first: {broken[0]}")
    if args.print_choice:
        print("[" + ", ".join(str(pick) for pick in solution.choice) + "]")
    return 1 if broken else 0


def _ending_s(reading_s: float, limit_s: float) -> float:
    """Seconds for unfolding, checking and printing the answer: about half of what reading took, and a reserve."""
    return 0.5 * reading_s + 0.02 * limit_s


def _as_json(solution: Solution, spent_s: float, broken: Sequence[str]) -> dict[str, Any]:
    """What `--json` prints; seconds count from the start of the process."""
    return {
        "strategy": solution.strategy,
        "cost": _plain(solution.cost),
        "bound": _plain(solution.bound),
        "gap": _plain(solution.gap),
        "seconds": solution.seconds + spent_s,
        "broken": list(broken[:10]),
        "trace": [[seconds + spent_s, _plain(cost), _plain(bound)] for seconds, cost, bound in solution.trace],
        "choice": list(solution.choice),
    }


def _record_as_json(record: Record) -> dict[str, Any]:
    return {name: _plain(value) if isinstance(value, float) else value for name, value in asdict(record).items()
            if name != "trace"}  # fmt: skip


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity


def run_bench(args: argparse.Namespace) -> int:
    """Run all strategies on all problems; print the table, save the CSV and, if asked for, the plot."""
    console = Console(stderr=args.json)
    names = strategy_names() if args.strategies == "all" else tuple(args.strategies.split(","))
    problems = [(path.name.removesuffix(".gz").removesuffix(".json"), Problem.load(path)) for path in args.problems]
    records = compare(
        problems,
        [(name, name) for name in names],
        time_limit_s=args.time_limit,
        seed=args.seed,
        on_record=lambda record: console.print(f"{record.problem}  {record.strategy}  {number(record.cost)}"),
    )
    save_csv(records, args.csv)
    if args.plot is not None:
        save_plot(records, args.plot)
    if args.json:
        print(json.dumps({"csv": str(args.csv), "records": [_record_as_json(record) for record in records]}))
    else:
        console.print(to_table(records))
    return 0
