"""Instances of the ASPLOS 2025 contest on intra-operator parallelism, under the contest's time limits.

    python benchmarks/iopddl.py DIR [--instances A,B,G] [--time-scale X] [--seed N] [--results FILE] [--write-docs]
    python benchmarks/iopddl.py --write-docs [--results FILE]

DIR holds `asplos-2025-iopddl-NAME.json.gz` (github.com/google/iopddl). Each instance is solved by the command
`autopar solve` in a process of its own: starting Python and reading count as time. The answer is checked by `evaluate`,
and appended to FILE. `--write-docs` renders the latest record of every instance into docs/search.md; without DIR it
does no more.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.search import Problem, evaluate
from autopar.search.progress import number

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "search.md"
RESULTS = ROOT / "benchmarks" / "results" / "iopddl.jsonl"
BEGIN, END = "<!-- iopddl: begin -->", "<!-- iopddl: end -->"
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


def measure(path: Path, name: str, *, time_scale: float, seed: int) -> dict[str, Any]:
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
        "machine": machine(),
        "date": str(dt.date.today()),
    }


def machine() -> str:
    """The processor's name and the number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def row(record: dict[str, Any]) -> str:
    """A record as a line of the table."""
    cost, bound, within = record["cost"], record["bound"], record["to_within_1_percent_s"]
    cells = (
        record["instance"],
        number(cost),
        f"{cost / INSTANCES[record['instance']].best_known:.4f}",
        number(bound),
        f"{100 * (cost - bound) / cost:.2f} %" if math.isfinite(cost) else "-",
        "-" if within is None else f"{within:.0f} s",
        f"{record['wall_s']:.0f} ({record['limit_s']:.0f})",
        f"{record['cpu_s']:.0f}",
        f"{record['machine']}, {record['date']}",
    )
    return "| " + " | ".join(cells) + " |"


def write_docs(results: Path) -> None:
    """Render the latest record of every instance, under its full time limit, between the marks in docs/search.md."""
    latest: dict[str, dict[str, Any]] = {}
    for line in results.read_text().splitlines():
        record = json.loads(line)
        if record["limit_s"] == INSTANCES[record["instance"]].time_limit_s:
            latest[record["instance"]] = record
    before, rest = DOCS.read_text().split(BEGIN)
    after = rest.split(END)[1]
    table = "\n".join((*HEADER, *(row(latest[name]) for name in sorted(latest))))
    DOCS.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the instances that DIR has, and render."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="where the instances lie; none: only render")
    parser.add_argument("--instances", default=",".join(INSTANCES), help="letters with commas between them")
    parser.add_argument("--time-scale", type=float, default=1.0, help="multiplies the contest's time limits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where records are appended, one JSON a line")
    parser.add_argument("--write-docs", action="store_true", help="render the records into docs/search.md")
    args = parser.parse_args(arguments)
    for name in args.instances.split(",") if args.folder else ():
        path = args.folder / f"asplos-2025-iopddl-{name}.json.gz"
        if not path.is_file():
            print(f"{path} is not there", file=sys.stderr)
            continue
        record = measure(path, name, time_scale=args.time_scale, seed=args.seed)
        print("\n".join((*HEADER, row(record))), flush=True)
        with args.results.open("a") as file:
            file.write(json.dumps(record) + "\n")
    if args.write_docs:
        write_docs(args.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
