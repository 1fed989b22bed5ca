"""The command `zoo`: architecture x mesh x plan -> verified, refused (why) or wrong."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from autopar.api import verify
from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.model_source import parse_mesh_shape
from autopar.zoo.models import TABLE, make

MESHES = ("4", "2x2", "2x2x2")
PLANS = ("ilp", "ddp", "fsdp", "megatron")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One cell of the table."""

    architecture: str
    mesh: str
    plan: str
    verdict: str  # verified, refused or wrong
    detail: str  # the worst relative error and its tensor, or why it was refused


def add_commands(subparsers: Any) -> None:
    """Add `zoo`."""
    zoo = subparsers.add_parser(
        "zoo",
        help="verify tiny transformers architectures on virtual ranks",
        epilog="example: autopar zoo --only llama,vit --mesh 2x2 --plans ilp,megatron",
    )
    zoo.add_argument("--only", help=f"architectures, of {', '.join(TABLE)}")
    zoo.add_argument("--mesh", action="append", help=f"ranks per axis, may be repeated (default {' '.join(MESHES)})")
    zoo.add_argument("--plans", default=",".join(PLANS), help=f"searches (default {','.join(PLANS)})")
    zoo.add_argument("--hardware", default="cpu", help="the profile to plan with (default cpu)")
    zoo.set_defaults(run=run_zoo)


def run_zoo(chosen: argparse.Namespace) -> int:
    """Print the table; exit code 1 if anything is wrong."""
    names = chosen.only.split(",") if chosen.only else list(TABLE)
    meshes, plans = chosen.mesh or list(MESHES), chosen.plans.split(",")
    cells = list(product(names, meshes, plans))
    console = Console(stderr=True)
    progress = track(cells, "zoo", console=console, disable=not console.is_terminal)
    outcomes = [check(*cell, hardware=chosen.hardware) for cell in progress]
    if chosen.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes]))
    else:
        Console().print(_table(outcomes))
        for line in _remarks(outcomes):
            print(line)
    return int(any(outcome.verdict == "wrong" for outcome in outcomes))


def check(architecture: str, mesh: str, plan: str, *, hardware: str) -> Outcome:
    """Verify one architecture under one plan on one mesh."""
    model, inputs = make(architecture)
    try:
        report = verify(model, Mesh(parse_mesh_shape(mesh), hardware=hardware), example_inputs=inputs, search=plan)
    except AutoparError as error:
        return Outcome(architecture, mesh, plan, "refused", f"{type(error).__name__}: {error.what}")
    detail = f"{report.worst_relative_error:.1e} {report.worst_tensor}"
    return Outcome(architecture, mesh, plan, "verified" if report.ok else "wrong", detail)


def _table(outcomes: Sequence[Outcome]) -> Table:
    plans = list(dict.fromkeys(outcome.plan for outcome in outcomes))
    table = Table("architecture", "mesh", *plans)
    cells = {(item.architecture, item.mesh, item.plan): item.verdict for item in outcomes}
    for architecture, mesh in dict.fromkeys((item.architecture, item.mesh) for item in outcomes):
        table.add_row(architecture, mesh, *(cells[architecture, mesh, plan] for plan in plans))
    return table


def _remarks(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for item in outcomes:
        if item.verdict != "verified":
            yield f"{item.architecture} {item.mesh} {item.plan}: {item.verdict}: {item.detail}"
    verified = sum(item.verdict == "verified" for item in outcomes)
    yield f"{verified} of {len(outcomes)} verified"
