"""The promise, measured: every model under every plan on every mesh, against the single device.

    python -m benchmarks.parity [--models llama,vit] [--searches ilp] [--meshes 2x2,2x4] [--results FILE] [--write-docs]

Meshes of up to four ranks run as local gloo processes, larger ones virtually in this process. Each row is added to the
results file as it is made, and rows that are there already are not made again, so the matrix can be run in parts.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.api import call_arguments, eager_values, make_options
from autopar.capture.program import InputKind
from autopar.capture.trace import capture
from autopar.compiler import plan_or_follow
from autopar.errors import AutoparError
from autopar.runtime.execution import Call, Reduction, State
from autopar.runtime.experts.load import ExpertCounter
from autopar.runtime.inputs import user_tensors
from autopar.runtime.memory_tracker import MemoryTracker
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.parameters import in_layout
from autopar.runtime.virtual_run import run_virtual_step
from autopar.verification import Values, compare, full_values
from tests.autopar.models import MODELS
from tests.gloo import run_on_ranks

SEARCHES = ("ddp", "fsdp", "megatron", "ilp")
REAL = ("2", "4", "2x2")
VIRTUAL = ("8", "2x4", "2x2x2")
SLACK = (
    1.1  # memory for the search, over what the ddp plan needs: without a limit, replicas are best for models so small
)
CASE_LIMIT_S = 1800.0
MEMORY_RUNS = 3
DOCS = Path(__file__).parent.parent / "docs" / "parity.md"
RESULTS = Path(__file__).parent / "results" / "parity.jsonl"
Row = dict[str, Any]
COLUMNS = ("model", "mesh", "ranks", "search", "outputs", "gradients", "buffers", "predicted kB", "measured kB", "")


def shape_of(mesh: str) -> tuple[int, ...]:
    return tuple(int(size) for size in mesh.split("x"))


def real_rows(name: str, mesh: str, searches: Sequence[str]) -> list[Row]:
    """On a live mesh, on each rank: compile, run one step, compare."""
    live = init_device_mesh("cpu", shape_of(mesh))
    model, inputs = MODELS[name]()
    args, kwargs = call_arguments(inputs)

    def run(search: str, limit: int | None) -> Row:
        pmodel = autopar.compile(model, live, example_inputs=inputs, search=search, memory_limit_bytes=limit)
        actual = full_values(pmodel, pmodel.program, args, kwargs)
        expected = eager_values(model, pmodel.program, args, kwargs)
        return _row(actual, expected, pmodel.plan.peak_bytes, _peak_bytes(pmodel, args, kwargs))

    return list(_rows(name, mesh, searches, run))


def virtual_rows(name: str, mesh: str, searches: Sequence[str]) -> list[Row]:
    """All ranks in this process."""
    shape = shape_of(mesh)
    planned_for = autopar.Mesh(shape, hardware="cpu")
    model, inputs = MODELS[name]()
    args, kwargs = call_arguments(inputs)
    program = capture(model, args, kwargs)
    expected = eager_values(model, program, args, kwargs)

    def run(search: str, limit: int | None) -> Row:
        planned = plan_or_follow(program, planned_for, make_options(search, limit, None, ()), None)
        plan, assignment = planned.plan, planned.assignment
        done = run_virtual_step(model, program, assignment, shape, args, kwargs, seed=0)
        actual = Values(done.outputs, done.gradients, done.buffers)
        return _row(actual, expected, plan.peak_bytes, max(done.peak_bytes))

    return list(_rows(name, mesh, searches, run))


def _rows(name: str, mesh: str, searches: Sequence[str], run: Callable[[str, int | None], Row]) -> Iterator[Row]:
    limit = None
    for search in searches:
        kind = "gloo" if mesh in REAL else "virtual"
        row: Row = {"model": name, "mesh": mesh, "ranks": kind, "search": search, "limit": limit}
        try:
            row |= run(search, limit if search == "ilp" else None)
            limit = limit or int(SLACK * row["predicted"])
        except AutoparError as error:
            row["error"] = f"{type(error).__name__}: {error.what}"
        yield row


def _row(actual: Values, expected: Values, predicted: int, measured: int) -> Row:
    report = compare(actual, expected, reference="")
    worst = {
        f"{kind}s": max((item.relative_error for item in report.comparisons if item.kind == kind), default=0.0)
        for kind in ("output", "gradient", "buffer")
    }
    return {**worst, "ok": report.ok, "predicted": predicted, "measured": measured}


def _peak_bytes(pmodel: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The most bytes alive on this rank while it runs its two graphs, the largest over the ranks.

    The least of some runs: all hold the same, and what a thread of the process group lets go of late only adds to it.
    """
    peak = torch.tensor(min(_peak_of_a_run(pmodel, args, kwargs) for _ in range(MEMORY_RUNS)))
    torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX)
    return int(peak)


def _peak_of_a_run(pmodel: ParallelModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    step = pmodel._shown()
    parameters = pmodel._parameters_by_name()
    counter = ExpertCounter(step.mesh)
    call = Call(
        step, State(parameters, dict(pmodel.named_buffers())), user_tensors(args, kwargs), 0, Reduction.NOW, counter
    )
    values = {node: value.detach().clone() for node, value in call.local_values().items()}
    tracker = MemoryTracker()
    tracker.hold(list(values.values()))
    with torch.no_grad(), tracker:
        held = step.run_forward(values)  # its outputs stay alive to the end, as for a caller who keeps them
        tangents = {}
        for slot in step.inputs[InputKind.TANGENT]:
            tangents[slot.node] = in_layout(torch.ones(slot.shape, dtype=slot.dtype), step.mesh, slot.layout).clone()
        step.run_backward(held.saved, tangents)
    return tracker.peak_bytes


def rows_of(name: str, mesh: str, searches: Sequence[str]) -> list[Row]:
    """The rows of one model on one mesh."""
    if mesh in REAL:
        rows: list[Row] = run_on_ranks(
            real_rows, math.prod(shape_of(mesh)), name, mesh, searches, timeout_s=CASE_LIMIT_S
        )[0]
        return rows
    return virtual_rows(name, mesh, searches)


def cells(row: Row) -> list[str]:
    head = [row[key] for key in ("model", "mesh", "ranks", "search")]
    if "error" in row:
        return [*head, "", "", "", "", "", row["error"]]
    errors = [f"{row[kind]:.1e}" for kind in ("outputs", "gradients", "buffers")]
    sizes = [f"{row[kind] / 1e3:.1f}" for kind in ("predicted", "measured")]
    return [*head, *errors, *sizes, "ok" if row["ok"] else "WRONG"]


def write_docs(rows: Sequence[Row]) -> None:
    """The table as a page, with where and when it was made."""
    ran = [row for row in rows if "error" not in row]
    worst = {kind: max(row[kind] for row in ran) for kind in ("outputs", "gradients", "buffers")}
    right, covered = sum(row["ok"] for row in ran), [row for row in ran if row["measured"] <= row["predicted"]]
    whole = len(MODELS) * len(SEARCHES) * len((*REAL, *VIRTUAL))
    tightest = min(row["measured"] / row["predicted"] for row in ran)
    machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    run = f"All {whole} cases have run. "
    if len(rows) < whole:
        run = f"{len(rows)} of the {whole} cases have run so far; the others are left out below. "
    lines = [
        "# Parity with the single device",
        "",
        f"By `python -m benchmarks.parity --write-docs`, {date.today()}, on a shared {machine}, float32.",
        "",
        "One training step of each tiny model of `tests/autopar/models.py` against the model as PyTorch runs it: the",
        "worst relative error of all outputs, gradients and buffers, scaled as `autopar.verify` scales them (limits:",
        "1e-5, 1e-4 and 1e-5). `gloo`: real processes; `virtual`: all ranks in one process. Peak bytes of a rank: the",
        f"plan's, and what a dispatch mode measured, on gloo the least of {MEMORY_RUNS} runs of the emitted program (a",
        "thread of gloo may let go late). A case is run once and kept: rows may come from different commits. `ilp` has "
        f"{SLACK} times the memory that the ddp plan needs.",
        "",
        f"{run}{right} of {len(ran)} plans are within the limits; the worst errors are "
        f"{worst['outputs']:.1e} (outputs), {worst['gradients']:.1e} (gradients), {worst['buffers']:.1e} (buffers). "
        f"The predicted peak covers the measured one in {len(covered)} of {len(ran)}; the least use of a prediction is "
        f"{tightest:.0%}.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "| " + " | ".join("---" for _ in COLUMNS) + " |",
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
    ]
    DOCS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--searches", default=",".join(SEARCHES))
    parser.add_argument("--meshes", default=",".join((*REAL, *VIRTUAL)))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--write-docs", action="store_true", help="write all rows of the results file to docs/parity.md"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    chosen.results.parent.mkdir(parents=True, exist_ok=True)
    lines = chosen.results.read_text().splitlines() if chosen.results.exists() else []
    made = {(row["model"], row["mesh"], row["search"]): row for row in map(json.loads, lines)}
    searches = chosen.searches.split(",")
    for mesh in filter(None, chosen.meshes.split(",")):
        for name in filter(None, chosen.models.split(",")):
            if all((name, mesh, search) in made for search in searches):
                continue
            fresh = rows_of(name, mesh, searches)  # all of them: the search's memory is that of the first
            made |= {(row["model"], row["mesh"], row["search"]): row for row in fresh}
            with chosen.results.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in fresh)
    rows = list(made.values())
    names, meshes = list(MODELS), [*REAL, *VIRTUAL]
    rows.sort(key=lambda row: (names.index(row["model"]), meshes.index(row["mesh"]), SEARCHES.index(row["search"])))
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*cells(row))
    Console(width=130).print(table)
    if chosen.write_docs:
        write_docs(rows)


if __name__ == "__main__":
    main()
