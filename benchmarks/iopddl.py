"""Instances of the ASPLOS 2025 contest on intra-operator parallelism, under the contest's time limits.

    python benchmarks/iopddl.py DIR [--instances A,B,G] [--time-scale X] [--seed N] [--write-docs]

DIR holds `asplos-2025-iopddl-NAME.json.gz` (github.com/google/iopddl). Reading counts as time. `--write-docs` puts the
rows that ran into the table in docs/search.md, with machine and date, and keeps the other rows.
"""

from __future__ import annotations

import argparse
import datetime as dt
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.search import Problem, solve
from autopar.search.progress import number

DOCS = Path(__file__).parent.parent / "docs" / "search.md"
BEGIN, END = "<!-- iopddl: begin -->", "<!-- iopddl: end -->"
HEADER = (
    "| | cost | cost / best known | proven bound | gap | to within 1 % | wall s (limit) | CPU s | machine, date |",
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
)


@dataclass(frozen=True, slots=True)
class Instance:
    """The contest's time limit, and the best cost that we know of."""

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


def measure(path: Path, name: str, *, time_scale: float, seed: int) -> str:
    """Solve one instance and give its row."""
    instance = INSTANCES[name]
    limit = instance.time_limit_s * time_scale
    started, cpu = time.perf_counter(), time.process_time()
    problem = Problem.load(path)
    reading = time.perf_counter() - started
    margin = 1.0 + 0.01 * limit  # unfolding and checking the last answer
    solution = solve(problem, time_limit_s=limit - reading - margin, seed=seed)
    wall, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    near = 1.01 * solution.cost
    within = next((reading + seconds for seconds, cost, _ in solution.trace if cost <= near), math.inf)
    cells = (
        name,
        number(solution.cost),
        f"{solution.cost / instance.best_known:.4f}",
        number(solution.bound),
        f"{100 * solution.gap:.2f} %",
        f"{within:.0f} s",
        f"{wall:.0f} ({limit:.0f})",
        f"{cpu_s:.0f}",
        f"{machine()}, {dt.date.today()}",
    )
    return "| " + " | ".join(cells) + " |"


def machine() -> str:
    """The processor's name and the number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def write_rows(rows: Sequence[str]) -> None:
    """Replace the rows of the same instances between the marks in docs/search.md."""
    before, rest = DOCS.read_text().split(BEGIN)
    old, after = rest.split(END)
    kept = [line for line in old.strip().splitlines() if line.startswith("|")][2:]
    by_name = {row.split("|")[1].strip(): row for row in (*kept, *rows)}
    table = "\n".join((*HEADER, *(by_name[name] for name in sorted(by_name))))
    DOCS.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the instances that DIR has."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the instances lie")
    parser.add_argument("--instances", default=",".join(INSTANCES), help="letters with commas between them")
    parser.add_argument("--time-scale", type=float, default=1.0, help="multiplies the contest's time limits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write-docs", action="store_true", help="refresh the table in docs/search.md")
    args = parser.parse_args(arguments)
    print("\n".join(HEADER))
    for name in args.instances.split(","):
        path = args.folder / f"asplos-2025-iopddl-{name}.json.gz"
        if not path.is_file():
            print(f"{path} is not there", file=sys.stderr)
            continue
        row = measure(path, name, time_scale=args.time_scale, seed=args.seed)
        print(row, flush=True)
        if args.write_docs:
            write_rows([row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
