"""Predicted step times beside measured ones, on two gloo ranks of one thread each: the table of docs/cost_models.md.

    torchrun --nproc-per-node 2 -m autopar calibrate --output mine.json
    python -m benchmarks.step_time --profile mine.json [--models mlp,gpt2] [--searches ddp,fsdp,ilp] [--write-docs]

A step is the forward and the backward with the sums of gradients, from when the first rank begins until the last one
is done. The plans of a model take turns, step by step, and the median counts: run it where nothing else runs. `--ops`
prints measured against priced time by kind of op, of further steps.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.cost_models.hardware import load_profile
from autopar.torch_compat import run_ranks
from benchmarks.step_times.measure import Record, measure
from benchmarks.step_times.models import HELD_OUT, LOOKED_AT
from benchmarks.tables import RESULTS, append, latest, line, stamp, write_table

RANKS = 2
PAGE = Path(__file__).parents[1] / "docs" / "cost_models.md"
MODELS = {**LOOKED_AT, **HELD_OUT}
HEAD = ("model", "plan", "predicted, ms", "step, ms", "ratio", "fastest step, ms", "processor time of a rank, ms")
NEAR = 0.25


def run_rank(rank: int, store: str, options: argparse.Namespace) -> None:
    """Measure every model; rank 0 keeps the records."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    mesh, profile = init_device_mesh("cpu", (RANKS,)), load_profile(options.profile)
    for name in options.models:
        found = measure(MODELS[name](), options.searches, mesh, profile, steps=options.steps, ops=options.ops)
        for search, record in found.items():
            if rank == 0:
                kept = {"model": name, "search": search, **stamp(), **record}
                append(kept, options.results)
                print(line(cells(kept)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def cells(record: Record) -> list[str]:
    """A row of the table."""
    predicted, step, fastest, processor = (
        f"{1e3 * record[name]:.0f}" for name in ("predicted_s", "step_s", "fastest_s", "processor_s")
    )
    return [record["model"], record["search"], predicted, step, f"{ratio(record):.2f}", fastest, processor]


def ratio(record: Record) -> float:
    """Predicted over measured time."""
    value: float = record["predicted_s"] / record["step_s"]
    return value


def lines(records: Sequence[Record]) -> Iterator[str]:
    """The table, and how many rows are within 25 %."""
    yield from (line(HEAD), line("---" for _ in HEAD))
    yield from (line(cells(record)) for record in records)
    for what, names in (("looked at", LOOKED_AT), ("held out", HELD_OUT)):
        found = np.array([ratio(record) for record in records if record["model"] in names])
        if len(found):
            errors = np.abs(found - 1)
            yield (
                f"\nModels {what}: {(errors <= NEAR).sum()} of {len(found)} within 25 %, median error "
                f"{np.median(errors):.0%}, ratios {found.min():.2f} to {found.max():.2f}."
            )


def by_op(records: Sequence[Record]) -> Iterator[str]:
    """Measured against priced milliseconds by kind of op, over all records, the largest difference first."""
    sums: dict[str, Any] = {}
    for record in records:
        for kind, values in record.get("kinds", {}).items():
            sums[kind] = np.array(values) + sums.get(kind, 0.0)
    yield line(("op", "count", "measured, ms", "priced, ms", "ratio"))
    yield line("---" for _ in range(5))
    for kind, (count, measured, priced) in sorted(sums.items(), key=lambda item: -abs(item[1][1] - item[1][2])):
        yield line((kind, f"{count:.0f}", f"{1e3 * measured:.2f}", f"{1e3 * priced:.2f}", f"{priced / measured:.2f}"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profile", help="of this machine, from `python -m autopar calibrate`; none: only print")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--searches", type=lambda text: text.split(","), default=["ddp", "fsdp", "ilp"])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--results", type=Path, default=RESULTS / "step_time.jsonl")
    parser.add_argument("--ops", action="store_true", help="print measured against priced time by kind of op")
    parser.add_argument("--write-docs", action="store_true", help="refresh the table in docs/cost_models.md")
    options = parser.parse_args(arguments)
    if options.profile:
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(run_rank, RANKS, f"{folder}/store", options)
    order = list(MODELS)
    records = latest(options.results, lambda item: (order.index(item["model"]), item["search"]))
    print("\n".join(by_op(records) if options.ops else lines(records)))
    if options.write_docs:
        write_table(PAGE, "step times", list(lines(records)))


if __name__ == "__main__":
    main()
