"""Every promised model through pipelines on real gloo processes; see `benchmarks.pipelines --gloo`.

One launch of processes for each mesh goes through all models and numbers of microbatches. What is compared is one step:
loss, other outputs, every gradient and every buffer, on every rank.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.arguments import call_arguments, with_batch
from autopar.errors import AutoparError
from autopar.zoo.plain import make_plain
from tests.autopar.models import MODELS
from tests.gloo import run_on_ranks

LAUNCH_S = 3600.0
MICROBATCHES = (1, 2, 4, 8)
STATISTICS_OF_THE_BATCH = ("resnet",)  # batch norm in training: microbatches are batches, as in gradient accumulation


@dataclass(frozen=True)
class Ranks:
    """A mesh of processes, and what runs on it. `schedules`: all of them with each number of microbatches."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    search: str
    schedules: tuple[str, ...]


MESHES = {
    "2 stages": Ranks((2,), ("pp",), "ddp", ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "zb-v")),
    "4 stages": Ranks((4,), ("pp",), "ddp", ("1f1b", "zb-h1")),
    "2 stages x data 2": Ranks((2, 2), ("pp", "dp"), "ddp", ("1f1b", "zb-h1")),
    "2 stages x tensor 2": Ranks((2, 2), ("pp", "tp"), "megatron", ("1f1b", "zb-h1")),
}
TWICE = ("interleaved", "zb-v")  # two stages on a rank


@dataclass(frozen=True)
class Checked:
    """One case on one rank. `refused`: the error in words, where it was."""

    mesh: str
    model: str
    schedule: str
    microbatches: int
    ok: bool
    worst: float = 0.0
    worst_tensor: str = ""
    refused: str = ""


def check_models(mesh: str, models: Sequence[str], counts: Sequence[int] = MICROBATCHES) -> list[Checked]:
    """All cases of a mesh, on this rank of it."""
    ranks = MESHES[mesh]
    live = init_device_mesh("cpu", ranks.shape, mesh_dim_names=ranks.names)
    started = time.monotonic()
    found = []
    for name in models:
        make: Callable[[], Any] = MODELS.get(name, lambda name=name: make_plain(name))
        found += [_checked(mesh, live, name, make, schedule, count) for schedule in ranks.schedules for count in counts]
        if dist.get_rank() == 0:
            print(f"{mesh}: {name}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return found


def _checked(mesh: str, live: Any, name: str, make: Callable[[], Any], schedule: str, count: int) -> Checked:
    model, inputs = make()
    ranks = MESHES[mesh]
    if "dp" in ranks.names:  # microbatches of one sample would not divide
        args, kwargs = with_batch(*call_arguments(inputs), 16)
        inputs = kwargs or args
    semantics = "accumulated" if name in STATISTICS_OF_THE_BATCH and count > 1 else None
    try:
        report = autopar.verify(
            model, live, example_inputs=inputs, search=ranks.search, schedule=schedule, microbatches=count,
            stages=ranks.shape[0] * (2 if schedule in TWICE else 1), batch_semantics=semantics,
        )  # fmt: skip
    except AutoparError as error:
        return Checked(mesh, name, schedule, count, ok=True, refused=f"{type(error).__name__}: {error.what}")
    worst = report.worst
    return Checked(mesh, name, schedule, count, report.ok, worst.relative_error, worst.name)


def on_processes(mesh: str, models: Sequence[str], counts: Sequence[int] = MICROBATCHES) -> list[Checked]:
    """All cases of a mesh, by every rank of a launch of its own."""
    every = run_on_ranks(check_models, math.prod(MESHES[mesh].shape), mesh, models, counts, timeout_s=LAUNCH_S)
    return [case for rank in every for case in rank]


def table(every: Sequence[Checked], models: Sequence[str]) -> list[str]:
    """Lines of Markdown: by model and mesh, cases verified on all ranks, those that are not, and the worst error."""
    lines = [
        "| model | " + " | ".join(MESHES) + " | worst relative error | refused |",
        f"|{' --- |' * (len(MESHES) + 3)}",
    ]
    for name in models:
        own = [case for case in every if case.model == name]
        cells = [_cell([case for case in own if case.mesh == mesh]) for mesh in MESHES]
        worst = max((case.worst for case in own), default=0.0)
        lines.append(f"| {name} | {' | '.join(cells)} | {worst:.1e} | {_refusals(own)} |")
    return lines


def _refusals(cases: Sequence[Checked]) -> str:
    refused = {(case.mesh, case.schedule, case.microbatches): case.refused for case in cases if case.refused}
    counts: dict[str, int] = {}
    for (mesh, _, _), why in refused.items():
        counts[f"{mesh}: {why}"] = counts.get(f"{mesh}: {why}", 0) + 1
    return "; ".join(f"{count} x {why}" for why, count in counts.items()) or "none"


def _cell(cases: Sequence[Checked]) -> str:
    """`24 of 24`: cases that every rank found equal, of those that ran."""
    by_case: dict[tuple[str, int], list[Checked]] = {}
    for case in cases:
        if not case.refused:
            by_case.setdefault((case.schedule, case.microbatches), []).append(case)
    equal = sum(all(case.ok for case in ranks) for ranks in by_case.values())
    return f"{equal} of {len(by_case)}"
