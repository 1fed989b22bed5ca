"""Instances of the ASPLOS 2025 contest on intra-operator parallelism, under the contest's time limits.

    python -m benchmarks.iopddl DIR [--instances A,B,G] [--time-scale X] [--seed N] [--results FILE] [--write-docs]
    python -m benchmarks.iopddl --write-docs [--results FILE]

DIR holds `asplos-2025-iopddl-NAME.json.gz` (github.com/google/iopddl). Each instance is solved by the command
`autopar solve` in a process of its own: starting Python and reading count as time. The answer is checked by `evaluate`,
and appended to FILE. `--write-docs` renders the latest record of every instance, under its full time limit, into
docs/search.md; without DIR it does no more.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.search import Problem, evaluate
from benchmarks.tables import RESULTS, ROOT, Record, append, latest, line, outcome, stamp, write_table

DOCS = ROOT / "docs" / "search.md"
HEADER = (
    "| | cost | cost / best known | proven bound | gap | to within 1 % | wall s (limit) | CPU s | machine, date |",
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
)


@dataclass(frozen=True, slots=True)
class Instance:
    """The contest's time limit, and the best cost that was known before these runs."""

    time_limit_s: float
    best_known: int


INSTANCES = {
    "A": Instance(60, 6_548_553_650),
    "B": Instance(60, 532_843),
    "G": Instance(120, 217_039),
    "K": Instance(180, 2_242_635_780),
    "M": Instance(180, 49_928_157_500),
    "P": Instance(240, 651_833_115_436),
    "S": Instance(240, 1_511_377_982),
    "U": Instance(300, 2_443_995_950),
    "V": Instance(300, 1_617_084),
}


def instance_path(folder: Path, name: str) -> Path:
    """Where an instance lies in a folder."""
    return folder / f"asplos-2025-iopddl-{name}.json.gz"


def measure(path: Path, name: str, *, time_scale: float, seed: int) -> Record:
    """Solve one instance from the shell, check the answer, and give its record."""
    limit = INSTANCES[name].time_limit_s * time_scale
    words = ["solve", str(path), "--time-limit", str(limit), "--seed", str(seed), "--json"]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "autopar", *words], stdout=subprocess.PIPE, check=False)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = json.loads(done.stdout)
    cost = evaluate(Problem.load(path), answer["choice"])
    near = 1.01 * cost
    return {
        "instance": name,
        "seed": seed,
        "limit_s": limit,
        "cost": cost,
        "bound": min(answer["bound"] if answer["bound"] is not None else -math.inf, cost),
        "to_within_1_percent_s": next(
            (at for at, seen, _ in answer["trace"] if seen is not None and seen <= near), None
        ),
        "wall_s": round(wall, 1),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        **stamp(),
    }


def row(record: Record) -> str:
    """A record as a line of the table."""
    within = record["to_within_1_percent_s"]
    cost, bound, gap = outcome(record["cost"], record["bound"])
    cells = (
        record["instance"],
        cost,
        f"{record['cost'] / INSTANCES[record['instance']].best_known:.4f}",
        bound,
        gap,
        "-" if within is None else f"{within:.0f} s",
        f"{record['wall_s']:.0f} ({record['limit_s']:.0f})",
        f"{record['cpu_s']:.0f}",
        f"{record['machine']}, {record['date']}",
    )
    return line(cells)


def table(results: Path = RESULTS / "iopddl.jsonl") -> list[str]:
    """The latest record of every instance under its full time limit."""
    records = latest(results, lambda record: (record["instance"], record["limit_s"]))
    full = [record for record in records if record["limit_s"] == INSTANCES[record["instance"]].time_limit_s]
    return [*HEADER, *map(row, full)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the instances that DIR has, and render."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="where the instances lie; none: only render")
    parser.add_argument("--instances", default=",".join(INSTANCES), help="letters with commas between them")
    parser.add_argument("--time-scale", type=float, default=1.0, help="multiplies the contest's time limits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--results", type=Path, default=RESULTS / "iopddl.jsonl", help="where records are appended, one JSON a line"
    )
    parser.add_argument("--write-docs", action="store_true", help="render the records into docs/search.md")
    args = parser.parse_args(arguments)
    for name in args.instances.split(",") if args.folder else ():
        path = instance_path(args.folder, name)
        if not path.is_file():
            print(f"{path} is not there", file=sys.stderr)
            continue
        record = measure(path, name, time_scale=args.time_scale, seed=args.seed)
        print("\n".join((*HEADER, row(record))), flush=True)
        append(record, args.results)
    if args.write_docs:
        write_table(DOCS, "iopddl", table(args.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
