"""The planner's commands: plan, explain, diff, verify."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from autopar import optim
from autopar.api import make_plan, verify
from autopar.arguments import PRECISIONS
from autopar.errors import ConstraintError
from autopar.mesh import Mesh
from autopar.model_source import load_model, parse_mesh_shape
from autopar.plan import Plan

MODEL_HELP = "package.module:factory; the factory returns (model, example_inputs)"


def add_commands(subparsers: Any) -> None:
    """Add the planner's commands."""
    plan = subparsers.add_parser(
        "plan",
        help="plan a model for a mesh",
        epilog="example: autopar plan my_models:gpt --mesh 2x4 --hardware h100 -o plan.json",
    )
    _add_planning(plan)
    plan.add_argument("-o", "--output", help="write the plan as JSON")
    plan.add_argument("--export-problem", metavar="FILE", help="write the search problem in the contest's JSON")
    plan.add_argument("--trace", metavar="FILE", help="write the simulated step, for ui.perfetto.dev")
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
    explain = subparsers.add_parser(
        "explain",
        help="what a saved plan chose for a name",
        epilog="example: autopar explain plan.json '*.mlp.*.weight'",
    )
    explain.add_argument("plan")
    explain.add_argument("pattern", help="parameter, op or module; shell-style wildcards")
    explain.set_defaults(run=run_explain)
    diff = subparsers.add_parser(
        "diff", help="what two saved plans decide differently", epilog="example: autopar diff a.json b.json"
    )
    diff.add_argument("left")
    diff.add_argument("right")
    diff.set_defaults(run=run_diff)


def _add_planning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("--mesh", required=True, type=parse_mesh_shape, help="ranks per axis, as 2x4")
    parser.add_argument("--hardware", default="h100", help="a shipped profile or a JSON file (default h100)")
    parser.add_argument(
        "--search", default="ilp", help="ilp, ddp, zero1, zero2, fsdp, megatron, or another strategy (default ilp)"
    )
    parser.add_argument("--memory-limit", type=float, metavar="BYTES", help="per rank, as 40e9")
    parser.add_argument("--optimizer", help="a class of torch.optim or autopar.optim whose state is counted")
    parser.add_argument("--shard-state", action="store_true", help="replicas divide the optimizer's state (ZeRO-1)")
    parser.add_argument("--precision", choices=list(PRECISIONS), help="compute in it, with parameters as they are")
    parser.add_argument("--pin", action="append", default=[], metavar="NAME=LAYOUT", help="as '*.wte.weight=R,S0'")
    parser.add_argument("--stages", type=int, help="pipeline stages, along the first mesh axis of that length")
    parser.add_argument("--schedule", help="of the pipeline: gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v or auto")
    parser.add_argument("--microbatches", type=int, help="parts in which the batch goes through the stages")
    parser.add_argument("--meta", action="store_true", help="make the model on the meta device: no memory for weights")


def _keywords(chosen: argparse.Namespace) -> dict[str, Any]:
    pins = {}
    for pin in chosen.pin:
        name, separator, layout = pin.partition("=")
        if not separator:
            raise ConstraintError(f"--pin {pin!r} has no '='", fix="write NAME=LAYOUT, as '*.wte.weight=R,S0'")
        pins[name] = layout
    return {
        "search": chosen.search,
        "memory_limit_bytes": None if chosen.memory_limit is None else int(chosen.memory_limit),
        "optimizer": _optimizer(chosen.optimizer, chosen.shard_state),
        "precision": chosen.precision,
        "constraints": pins,
        "stages": chosen.stages,
        "schedule": chosen.schedule,
        "microbatches": chosen.microbatches,
    }


def _optimizer(name: str | None, sharded: bool) -> Any:  # noqa: FBT001
    found = getattr(torch.optim, name, None) or getattr(optim, name, None) if name else None
    if name and not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConstraintError(
            f"neither torch.optim nor autopar.optim has an optimizer {name!r}", fix="name one, as AdamW or SM3"
        )
    return partial(optim.ShardedState, optimizer=found or torch.optim.AdamW) if sharded else found


def run_plan(chosen: argparse.Namespace) -> int:
    """Print a plan; save it if asked to."""
    with torch.device("meta") if chosen.meta else nullcontext():
        source = load_model(chosen.model)
    mesh = Mesh(chosen.mesh, hardware=chosen.hardware)
    plan = make_plan(source.model, mesh, example_inputs=source.require_inputs(), **_keywords(chosen))
    if chosen.output:
        plan.save(chosen.output)
    if chosen.export_problem:
        plan.export_problem(chosen.export_problem)
    if chosen.trace:
        plan.simulate().save_trace(chosen.trace)
    print(json.dumps(plan.to_json()) if chosen.json else plan)
    return 0


def run_verify(chosen: argparse.Namespace) -> int:
    """Print the worst error, and every tensor if one is wrong; exit code 1 then."""
    source = load_model(chosen.model)
    mesh = Mesh(chosen.mesh, hardware=chosen.hardware)
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


def run_explain(chosen: argparse.Namespace) -> int:
    """Print what a plan decided for a name; exit code 1 if nothing matches."""
    plan = Plan.load(chosen.plan)
    text = plan.explain(chosen.pattern)
    print(json.dumps({"text": text}) if chosen.json else text)
    return 0 if plan.matching(chosen.pattern) else 1


def run_diff(chosen: argparse.Namespace) -> int:
    """Print the difference of two plans."""
    text = Plan.load(chosen.left).diff(Plan.load(chosen.right))
    print(json.dumps({"text": text}) if chosen.json else text)
    return 0
