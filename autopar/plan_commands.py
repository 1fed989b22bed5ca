"""Commands on saved plans: explain, what-if, diff, report."""

from __future__ import annotations

import argparse
import json
from typing import Any

from autopar.api import make_plan
from autopar.commands import (
    MODEL_HELP,
    add_meta,
    add_training,
    load_chosen,
    optimizer_named,
    parse_memory_limit,
    pins_of,
    working,
)
from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.model_source import parse_mesh_shape
from autopar.plan import Plan
from autopar.recording import Recording
from autopar.report.explain import explanations_text, stages_text
from autopar.report.measured import measured_text
from autopar.report.memory import memory_text
from autopar.report.page import report_page
from autopar.written_files import written_file


def add_commands(subparsers: Any) -> None:
    """Add the commands that read saved plans."""
    _add_explain(subparsers)
    what_if = subparsers.add_parser(
        "what-if",
        help="what a saved plan would be under other circumstances",
        epilog="example: autopar what-if plan.json --model my_models:gpt --pin '*.wte.weight=R,S0' -o other.json",
    )
    what_if.add_argument("plan")
    _add_model(what_if, required=True)
    what_if.add_argument("--pin", action="append", default=[], metavar="NAME=LAYOUT", help="as '*.wte.weight=R,S0'")
    what_if.add_argument("--memory-limit", type=parse_memory_limit, metavar="BYTES", help="per rank, as 40e9")
    what_if.add_argument("--on", metavar="HARDWARE", help="another hardware profile, or a JSON file")
    what_if.add_argument("--mesh", type=parse_mesh_shape, help="another mesh, as 2x4")
    what_if.add_argument("--batch", type=int, help="another global batch")
    what_if.add_argument("-o", "--output", help="write the new plan as JSON")
    what_if.set_defaults(run=run_what_if)
    diff = subparsers.add_parser(
        "diff", help="what two saved plans decide differently", epilog="example: autopar diff a.json b.json"
    )
    diff.add_argument("left")
    diff.add_argument("right")
    diff.set_defaults(run=run_diff)
    report = subparsers.add_parser(
        "report",
        help="write a saved plan as one HTML page",
        epilog="example: autopar report plan.json -o report.html",
    )
    report.add_argument("plan")
    report.add_argument("-o", "--output", default="report.html", help="the page (default report.html)")
    report.add_argument("--recording", metavar="FILE", help="a run of this plan, as recording.save wrote it")
    _add_model(report)
    report.set_defaults(run=run_report)


def _add_explain(subparsers: Any) -> None:
    explain = subparsers.add_parser(
        "explain",
        help="what a saved plan chose for a name, and with --model why, and what else there was",
        epilog="example: autopar explain plan.json '*.mlp.*.weight' --model my_models:gpt",
    )
    explain.add_argument("plan")
    explain.add_argument("pattern", help="parameter, op, module, `stage 1` or `schedule`; shell-style wildcards")
    explain.add_argument("--memory", action="store_true", help="print memory over time too")
    _add_model(explain)
    explain.set_defaults(run=run_explain)


def _add_model(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    parser.add_argument("--model", required=required, help=f"the plan's model: {MODEL_HELP}")
    parser.add_argument("--hardware", help="the plan's hardware profile, if it is a JSON file")
    add_training(parser, optimizer_default=" (default: the plan's)")
    add_meta(parser)


def _loaded(chosen: argparse.Namespace) -> Plan:
    """The plan; priced anew, and ready to answer questions, if its model is named."""
    plan = Plan.load(chosen.plan)
    if not chosen.model:
        return plan
    source = load_chosen(chosen)
    mesh = Mesh(plan.mesh_shape, plan.axis_names, hardware=chosen.hardware or plan.hardware)
    named = chosen.optimizer or (None if plan.optimizer == "none" else plan.optimizer)
    with working(f"pricing the plan for {source.name}"):
        return make_plan(
            source.model,
            mesh,
            example_inputs=source.require_inputs(),
            plan=plan,
            memory_limit_bytes=plan.memory_limit_bytes,
            optimizer=optimizer_named(named, sharded=chosen.shard_state),
            precision=chosen.precision,
            compress=chosen.compress,
        )


def run_explain(chosen: argparse.Namespace) -> int:
    """Print what a plan decided for a name; exit code 1 if nothing matches."""
    plan = _loaded(chosen)
    with working("solving for what else there was"):
        found, stages = plan.explanations(chosen.pattern), stages_text(plan, chosen.pattern)
    text = explanations_text(plan, chosen.pattern, found, stages)
    if chosen.json:
        print(json.dumps({"text": text, "decisions": [item.to_json() for item in found]}))
    else:
        print(text)
        if chosen.memory:
            print(memory_text(plan))
    return 0 if found or stages else 1


def run_what_if(chosen: argparse.Namespace) -> int:
    """Print the new plan, and how it differs."""
    changes = (chosen.pin or None, chosen.memory_limit, chosen.on, chosen.mesh, chosen.batch)
    if all(change is None for change in changes):
        raise PlanError("nothing is changed", fix="give --pin, --memory-limit, --on, --mesh or --batch")
    plan = _loaded(chosen)
    pins = pins_of(chosen.pin)
    with working("planning again"):
        changed = plan.what_if(
            pin=pins, memory_limit_bytes=chosen.memory_limit, hardware=chosen.on, mesh=chosen.mesh, batch=chosen.batch
        )
        if chosen.output:
            changed.emitted().save(chosen.output)
    difference = plan.diff(changed)
    print(
        json.dumps({"plan": changed.to_json(), "difference": difference}) if chosen.json else f"{changed}\n{difference}"
    )
    return 0


def run_diff(chosen: argparse.Namespace) -> int:
    """Print the difference of two plans."""
    text = Plan.load(chosen.left).diff(Plan.load(chosen.right))
    print(json.dumps({"text": text}) if chosen.json else text)
    return 0


def run_report(chosen: argparse.Namespace) -> int:
    """Write the page."""
    plan = _loaded(chosen)
    if chosen.model and plan.pipeline is None:
        _ = plan.frontier
    recording = Recording.load(chosen.recording) if chosen.recording else None
    page = report_page(plan, recording)
    with written_file(chosen.output) as file:
        file.write_text(page, encoding="utf-8", errors="backslashreplace")
    measured = measured_text(plan, recording) if recording else ""
    if chosen.json:
        print(json.dumps({"output": chosen.output, "bytes": len(page), "measured": measured}))
    else:
        print(*filter(None, (measured, f"wrote {chosen.output}")), sep="\n")
    return 0
