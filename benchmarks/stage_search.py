"""Stage search on PipeDream's published profiles, under PipeDream's own model of a stage: ours beside theirs.

    python -m benchmarks.stage_search [--quick] [--write-docs]

A stage of compute c and parameters w on m machines takes (c + 4 (m - 1) w / (B m)) / m a minibatch, and a pipeline as
long as its longest stage; activations and memory are left out, as in the optimizer of the PipeDream repository whose
results pipedream.json holds. "published" are partitions of the papers and the repository's runtime, with the best place
for their cuts. The graphs are cut along one topological order of their nodes.
"""

from __future__ import annotations

import argparse
import csv
import graphlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autopar.search.stage_ilp import CutSolution, solve_cut
from autopar.search.stage_problem import Cut, StageOption, StageProblem, best_even_cut, evaluate_cut
from benchmarks.tables import ROOT, line, write_table

DATA = Path(__file__).parent / "data"
DOCS = ROOT / "docs" / "pipelines.md"
HEAD = ("model", "machines", "GB/s", "data parallel, ms", "even, ms", "published, ms", "PipeDream's optimizer, ms",
        "autopar, ms", "stages x machines", "s")  # fmt: skip
PUBLISHED = {"vgg16": {4: (3, 1), 8: (7, 1), 16: (15, 1)}, "alexnet": {4: (3, 1), 16: (15, 1)},
             "resnet50": {4: (2, 1, 1), 8: (4, 2, 2), 16: (8, 4, 4)}, "gnmt": {4: (1, 1, 1, 1)}}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Profile:
    """A model's nodes in a topological order: seconds forward and backward, parameter bytes."""

    seconds: np.ndarray[Any, np.dtype[np.float64]]
    parameter_bytes: np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Row:
    """One case: seconds of a minibatch by each way, and what was found."""

    model: str
    machines: int
    bytes_per_s: float
    data_parallel_s: float
    even_s: float
    published_s: float | None
    theirs_s: float
    ours: CutSolution
    problem: StageProblem
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether ours is no worse than any other, by more than rounding."""
        others = [self.data_parallel_s, self.even_s, self.theirs_s, self.published_s or np.inf]
        return self.ours.cost.step_s <= min(others) * (1 + 1e-6)


def read_profile(model: str, folder: Path = DATA) -> Profile:
    """The published profile; input nodes compute nothing."""
    with (folder / "pipedream_profiles_nodes.csv").open() as lines:
        nodes = {row["node"]: row for row in csv.DictReader(lines) if row["model"] == model}
    graph: dict[str, list[str]] = {name: [] for name in sorted(nodes, key=lambda name: int(name[4:]))}
    for source, reader in json.loads((folder / "pipedream_profiles_graphs.json").read_text())[model]["edges"]:
        graph[reader].append(source)
    order = list(graphlib.TopologicalSorter(graph).static_order())
    kept = [nodes[name] for name in order if not nodes[name]["op"].startswith("Input")]
    return Profile(
        np.array([1e-3 * (float(row["fwd_ms"]) + float(row["bwd_ms"])) for row in kept]),
        np.array([float(row["param_bytes"]) for row in kept]),
    )


def make_problem(profile: Profile, machines: int, bytes_per_s: float) -> StageProblem:
    """PipeDream's model: one option for each number of replicas, and the longest stage as the price."""
    nothing = np.zeros(len(profile.seconds))
    options = tuple(
        StageOption(str(count), "machine", count, np.inf, profile.seconds / count, nothing, nothing,
                    4 * (count - 1) * profile.parameter_bytes / (bytes_per_s * count) / count)
        for count in range(1, machines + 1)
    )  # fmt: skip
    return StageProblem(nothing, options, (("machine", machines),), 1, asynchronous=True)


def best_with_replicas(problem: StageProblem, replicas: Sequence[int]) -> float:
    """The longest stage of a pipeline with these replicas, its cuts where they are best: by recursion over layers."""
    longest = np.full(problem.layers + 1, np.inf)
    longest[0] = 0.0
    for count in replicas:
        option = problem.options[count - 1]
        sums = np.concatenate([[0.0], np.cumsum(option.work_s + option.sync_s)])
        longest = np.array(
            [min((max(longest[first], sums[end] - sums[first]) for first in range(end)), default=np.inf)
             for end in range(problem.layers + 1)]
        )  # fmt: skip
    return float(longest[-1])


def rows(folder: Path = DATA, *, most_machines: int = 16) -> Iterator[Row]:
    """Every case of one level of links that the published optimizer ran."""
    for run in json.loads((folder / "pipedream.json").read_text())["optimizer_runs_here"]["runs"]:
        (machines, *more), bytes_per_s = run["machines_per_level"], run["bandwidth_Bps"][0]
        if more or machines > most_machines:
            continue
        problem = make_problem(read_profile(run["model"], folder), machines, bytes_per_s)
        began = time.perf_counter()
        ours = solve_cut(problem)
        seconds = time.perf_counter() - began
        even = best_even_cut(problem)
        assert even is not None  # one stage on one machine always fits
        whole = evaluate_cut(problem, Cut((problem.layers,), (machines - 1,))).step_s
        known = PUBLISHED[run["model"]].get(machines)
        yield Row(run["model"], machines, bytes_per_s, whole, even[1].step_s,
                  best_with_replicas(problem, known) if known else None, run["time_per_stage_s"], ours, problem,
                  seconds)  # fmt: skip


def cells(row: Row) -> list[str]:
    """The row of the table."""
    stages = [row.problem.options[option].devices for option in row.ours.cut.options]
    known = PUBLISHED[row.model].get(row.machines)
    published = f"{1e3 * row.published_s:.2f} ({'-'.join(map(str, known or ()))})" if row.published_s else ""
    values = (row.model, row.machines, f"{row.bytes_per_s / 1e9:g}", f"{1e3 * row.data_parallel_s:.2f}",
              f"{1e3 * row.even_s:.2f}", published, f"{1e3 * row.theirs_s:.2f}", f"{1e3 * row.ours.cost.step_s:.2f}",
              "-".join(map(str, stages)), f"{row.seconds:.1f}")  # fmt: skip
    return list(map(str, values))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 0 if ours is never worse."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="four machines only")
    parser.add_argument("--write-docs", action="store_true", help="refresh the table in docs/pipelines.md")
    options = parser.parse_args(arguments)
    lines, good = [line(HEAD), line("---" for _ in HEAD)], True
    print(*lines, sep="\n")
    for row in rows(most_machines=4 if options.quick else 16):
        lines.append(line(cells(row)))
        good = good and row.holds
        print(lines[-1], "" if row.holds else "WORSE", f"bound {1e3 * row.ours.bound_s:.2f}", flush=True)
    if options.write_docs:
        write_table(DOCS, "stage search", lines)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
