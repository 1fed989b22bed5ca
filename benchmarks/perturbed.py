"""Contest instances that nobody has tuned for: other costs, other limits, and parts of them.

    python -m benchmarks.perturbed DIR [--instances V,K] [--kinds costs,limit,part] [--seeds 1,2] [--time-scale 0.5]
                                       [--results FILE] [--write-docs]

No best value is known for these, so the proven gap is what there is to compare. `costs`: every node and every edge is
scaled by a random factor, and every single cost by a smaller one. `limit`: the usage limit is moved by a factor between
0.97 and 1.25. `part`: a random half of the nodes, in one stretch, under a limit that shrinks with their least usages.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autopar.errors import InfeasibleProblemError
from autopar.search import FORBIDDEN, Problem, evaluate, peak_usage, solve
from benchmarks.iopddl import DOCS, INSTANCES, instance_path
from benchmarks.tables import RESULTS, Record, append, latest, line, outcome, stamp, write_table

HEADER = (
    "| | kind, seed | nodes | cost | proven bound | gap | s (limit) | machine, date |",
    "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
)


def other_costs(problem: Problem, random: np.random.Generator) -> Problem:
    """Allowed costs times a factor for the node or edge and one for the entry, whole numbers again."""

    def scaled(costs: Any) -> Any:
        factor = np.exp(random.normal(0.0, 0.5)) * np.exp(random.normal(0.0, 0.1, costs.shape))
        return np.where(costs >= FORBIDDEN, costs, np.round(costs * factor))

    costs, edge_costs = tuple(map(scaled, problem.costs)), tuple(map(scaled, problem.edge_costs))
    return replace(problem, costs=costs, edge_costs=edge_costs)


def other_limit(problem: Problem, random: np.random.Generator) -> Problem:
    """Another usage limit; may be infeasible below the original one."""
    assert problem.usage_limit is not None
    return replace(problem, usage_limit=float(math.floor(problem.usage_limit * random.uniform(0.97, 1.25))))


def part(problem: Problem, random: np.random.Generator) -> Problem:
    """Half of the nodes in one stretch, and the edges between them."""
    assert problem.usage_limit is not None
    count = len(problem.costs)
    first = int(random.integers(0, count - count // 2))
    kept = range(first, first + count // 2)
    edges = [at for at, (a, b) in enumerate(problem.edges) if a in kept and b in kept]
    smaller = Problem(
        costs=tuple(problem.costs[node] for node in kept),
        usages=tuple(problem.usages[node] for node in kept),
        intervals=tuple(problem.intervals[node] for node in kept),
        edges=tuple((problem.edges[at][0] - first, problem.edges[at][1] - first) for at in edges),
        edge_costs=tuple(problem.edge_costs[at] for at in edges),
    )
    share = _thriftiest_peak(smaller) / _thriftiest_peak(problem)
    return replace(smaller, usage_limit=float(math.ceil(problem.usage_limit * share)))


def _thriftiest_peak(problem: Problem) -> float:
    return peak_usage(problem, [int(usages.argmin()) for usages in problem.usages])


KINDS: dict[str, Callable[[Problem, np.random.Generator], Problem]] = {
    "costs": other_costs,
    "limit": other_limit,
    "part": part,
}


def measure(problem: Problem, name: str, kind: str, seed: int, limit: float) -> Record:
    """Solve one perturbed instance; `inf` for one that is proven infeasible."""
    changed = KINDS[kind](problem, np.random.default_rng(seed))
    started = time.perf_counter()
    record: Record = {"instance": name, "kind": kind, "seed": seed, "limit_s": limit, "nodes": len(changed.costs)}
    try:
        solution = solve(changed, time_limit_s=limit)
        cost = evaluate(changed, solution.choice)
        record |= {"cost": cost, "bound": min(solution.bound, cost)}
    except InfeasibleProblemError:
        record |= {"cost": math.inf, "bound": math.inf}
    return record | {"wall_s": round(time.perf_counter() - started, 1)} | stamp()


def row(record: Record) -> str:
    """A record as a line of the table."""
    cells = (
        record["instance"],
        f"{record['kind']}, {record['seed']}",
        str(record["nodes"]),
        *outcome(record["cost"], record["bound"]),
        f"{record['wall_s']:.0f} ({record['limit_s']:.0f})",
        f"{record['machine']}, {record['date']}",
    )
    return line(cells)


def table(results: Path = RESULTS / "perturbed.jsonl") -> list[str]:
    """The latest record of every perturbed instance."""
    records = latest(results, lambda record: (record["instance"], record["kind"], record["seed"]))
    return [*HEADER, *map(row, records)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, append, render."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="where the instances lie; none: only render")
    parser.add_argument("--instances", default="A,G,K,V", help="letters with commas between them")
    parser.add_argument("--kinds", default=",".join(KINDS), help="names with commas between them")
    parser.add_argument("--seeds", default="1", help="numbers with commas between them")
    parser.add_argument("--time-scale", type=float, default=0.5, help="multiplies the contest's time limits")
    parser.add_argument(
        "--results", type=Path, default=RESULTS / "perturbed.jsonl", help="where records are appended, one JSON a line"
    )
    parser.add_argument("--write-docs", action="store_true", help="render the records into docs/search.md")
    args = parser.parse_args(arguments)
    for name in args.instances.split(",") if args.folder else ():
        problem = Problem.load(instance_path(args.folder, name))
        limit = INSTANCES[name].time_limit_s * args.time_scale
        for kind, seed in itertools.product(args.kinds.split(","), map(int, args.seeds.split(","))):
            record = measure(problem, name, kind, seed, limit)
            print("\n".join((*HEADER, row(record))), flush=True)
            append(record, args.results)
    if args.write_docs:
        write_table(DOCS, "perturbed", table(args.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
