"""The planner's commands: plan and verify."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from rich.console import Console

from autopar import optim
from autopar.api import make_plan, verify
from autopar.arguments import PRECISIONS
from autopar.auto_stages import AUTO
from autopar.errors import ConstraintError, UsageError
from autopar.hugging_face import PREFIX
from autopar.mesh import Mesh
from autopar.model_source import ModelSource, load_model, parse_mesh_shape
from autopar.passes.packings import LOSSY
from autopar.plan_entries import SEMANTICS
from autopar.plan_questions import check_memory_limit
from autopar.report.memory import memory_text

MODEL_HELP = "package.module:factory, which returns (model, example_inputs); or hf:CONFIG[:BATCHxSEQUENCE]"


def add_commands(subparsers: Any) -> None:
    """Add the planner's commands."""
    plan = subparsers.add_parser(
        "plan",
        help="plan a model for a mesh",
        epilog="example: autopar plan my_models:gpt --mesh 2x4 --hardware h100 -o plan.json",
    )
    _add_planning(plan)
    add_meta(plan)
    plan.add_argument("-o", "--output", help="write the plan as JSON")
    plan.add_argument("--export-problem", metavar="FILE", help="write the search problem in the contest's JSON")
    plan.add_argument("--trace", metavar="FILE", help="write the simulated step, for ui.perfetto.dev")
    plan.add_argument("--memory", action="store_true", help="print memory over time, and the tensors at the peak")
    plan.add_argument("--frontier", action="store_true", help="print what less memory costs; saved with -o")
    plan.set_defaults(run=run_plan)
    check = subparsers.add_parser(
        "verify",
        help="run the distributed program on virtual ranks and compare it with the single-device one",
        epilog="example: autopar verify my_models:gpt --mesh 2x2",
    )
    _add_planning(check)
    check.add_argument("--plan", help="follow a saved plan instead of searching")
    check.add_argument("--tolerance", type=float, help="largest relative error allowed, for every tensor")
    check.set_defaults(run=run_verify)


def _add_planning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("--mesh", required=True, type=parse_mesh_shape, help="ranks per axis, as 2x4")
    parser.add_argument("--hardware", default="h100", help="a shipped profile or a JSON file (default h100)")
    parser.add_argument(
        "--search", default="ilp", help="ilp, ddp, zero1, zero2, fsdp, megatron, or another strategy (default ilp)"
    )
    parser.add_argument("--memory-limit", type=parse_memory_limit, metavar="BYTES", help="per rank, as 40e9")
    add_training(parser)
    parser.add_argument("--pin", action="append", default=[], metavar="NAME=LAYOUT", help="as '*.wte.weight=R,S0'")
    parser.add_argument(
        "--stages",
        type=_stages,
        help="pipeline stages, along the first mesh axis of that length, or auto",
    )
    parser.add_argument("--schedule", help="of the pipeline: gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v or auto")
    parser.add_argument("--microbatches", type=int, help="parts in which the batch goes through the stages")
    parser.add_argument(
        "--batch-semantics", choices=list(SEMANTICS), help="accumulated: each microbatch is a batch by itself"
    )


def parse_memory_limit(text: str) -> int:
    """The bytes of a rank as they are written in a shell.

    >>> parse_memory_limit("40e9")
    40000000000
    """
    try:
        bytes_ = float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number of bytes", fix="write bytes per rank, as 40e9") from None
    check_memory_limit(bytes_)
    return math.ceil(bytes_)


def _stages(text: str) -> int | str:
    if text != AUTO and not text.isdecimal():
        raise UsageError(f"--stages {text!r} is neither a number nor {AUTO}", fix=f"write --stages 4, or {AUTO}")
    return text if text == AUTO else int(text)


def add_training(parser: argparse.ArgumentParser, *, optimizer_default: str = "") -> None:
    """How the model is made and trained."""
    optimizer = f"a class of torch.optim or autopar.optim whose state is counted{optimizer_default}"
    parser.add_argument("--optimizer", help=optimizer)
    parser.add_argument("--shard-state", action="store_true", help="replicas divide the optimizer's state (ZeRO-1)")
    parser.add_argument("--precision", choices=list(PRECISIONS), help="compute in it, with parameters as they are")
    parser.add_argument("--compress", choices=list(LOSSY), help="hold saved values in it where memory is short")


def add_meta(parser: argparse.ArgumentParser) -> None:
    """Where the model is made; plans read no weights."""
    parser.add_argument("--meta", action="store_true", help="make the model on the meta device: no memory for weights")


def load_chosen(chosen: argparse.Namespace) -> ModelSource:
    """The model that was named, made where it was asked for; plans read no weights, so hf: models have none."""
    with torch.device("meta") if chosen.meta or chosen.model.startswith(PREFIX) else nullcontext():
        return load_model(chosen.model)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say on a terminal what takes its time; nothing where nobody looks."""
    console = Console(stderr=True)
    with console.status(what) if console.is_terminal else nullcontext():
        yield


def _keywords(chosen: argparse.Namespace) -> dict[str, Any]:
    return {
        "search": chosen.search,
        "memory_limit_bytes": chosen.memory_limit,
        "optimizer": optimizer_named(chosen.optimizer, sharded=chosen.shard_state),
        "precision": chosen.precision,
        "compress": chosen.compress,
        "constraints": pins_of(chosen.pin),
        "stages": chosen.stages,
        "schedule": chosen.schedule,
        "microbatches": chosen.microbatches,
        "batch_semantics": chosen.batch_semantics,
    }


def pins_of(texts: Sequence[str]) -> dict[str, str]:
    """`NAME=LAYOUT` of a shell, read."""
    pins = {}
    for pin in texts:
        name, separator, layout = pin.rpartition("=")
        if not separator:
            raise ConstraintError(f"--pin {pin!r} has no '='", fix="write NAME=LAYOUT, as '*.wte.weight=R,S0'")
        pins[name] = layout
    return pins


def optimizer_named(name: str | None, *, sharded: bool = False) -> Any:
    """A class by its name; `sharded`: with its state divided among replicas."""
    found = getattr(torch.optim, name, None) or getattr(optim, name, None) if name else None
    if name and not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConstraintError(
            f"neither torch.optim nor autopar.optim has an optimizer {name!r}", fix="name one, as AdamW or SM3"
        )
    return partial(optim.ShardedState, optimizer=found or torch.optim.AdamW) if sharded else found


def run_plan(chosen: argparse.Namespace) -> int:
    """Print a plan; save it if asked to."""
    source = load_chosen(chosen)
    mesh = Mesh(chosen.mesh, hardware=chosen.hardware)
    with working(f"planning {source.name}"):
        plan = make_plan(source.model, mesh, example_inputs=source.require_inputs(), **_keywords(chosen))
        if chosen.frontier:
            _ = plan.frontier  # before it is saved
    if chosen.output:
        plan.save(chosen.output)
    if chosen.export_problem:
        plan.export_problem(chosen.export_problem)
    if chosen.trace:
        plan.simulate().save_trace(chosen.trace)
    print(json.dumps(plan.to_json()) if chosen.json else plan)
    if chosen.memory and not chosen.json:
        print(memory_text(plan))
    if chosen.frontier and not chosen.json:
        print(plan.frontier_table())
    return 0


def run_verify(chosen: argparse.Namespace) -> int:
    """Print the worst error, and every tensor if one is wrong; exit code 1 then."""
    source = load_model(chosen.model)
    mesh = Mesh(chosen.mesh, hardware=chosen.hardware)
    with working(f"planning {source.name} and running its ranks"):
        report = verify(
            source.model,
            mesh,
            example_inputs=source.require_inputs(),
            plan=chosen.plan,
            tolerance=chosen.tolerance,
            **_keywords(chosen),
        )
    if chosen.json:
        tensors = {item.name: item.relative_error for item in report.comparisons}
        found = {"ok": report.ok, "worst": report.worst_tensor, "relative_errors": tensors}
        planned_bytes = report.plan.peak_bytes if report.plan else None
        print(json.dumps({**found, "peak_bytes": report.peak_bytes, "planned_peak_bytes": planned_bytes}))
    else:
        print(report if report.ok else f"{report}\n{report.table}")
    return 0 if report.ok else 1
