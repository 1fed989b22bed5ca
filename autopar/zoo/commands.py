"""The command `zoo`: architecture x mesh x plan -> verified, refused (why) or wrong."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from autopar.zoo.checking import FAMILIES, Outcome, check_virtually, make_model, names_of
from autopar.zoo.on_ranks import GLOO, check_on_ranks
from autopar.zoo.page import write_page

MESHES = ("4", "2x2", "2x2x2")
GLOO_MESHES = ("2",)
PLANS = ("ilp", "ddp", "fsdp", "megatron")


def add_commands(subparsers: Any) -> None:
    """Add `zoo`."""
    zoo = subparsers.add_parser(
        "zoo",
        help="verify tiny architectures on virtual or gloo ranks",
        epilog="example: autopar zoo --only llama,vit --mesh 2x2 --plans ilp,megatron",
    )
    zoo.add_argument("--family", default="zoo", choices=[*FAMILIES, "all"], help="which models (default zoo)")
    zoo.add_argument("--only", help="models by name, of any family")
    zoo.add_argument("--mesh", action="append", help=f"ranks per axis, may be repeated (default {' '.join(MESHES)})")
    zoo.add_argument("--plans", default=",".join(PLANS), help=f"searches (default {','.join(PLANS)})")
    zoo.add_argument("--hardware", default="cpu", help="the profile to plan with (default cpu)")
    zoo.add_argument("--gloo", action="store_true", help="on processes of this machine (mesh: 2)")
    zoo.add_argument(
        "--results", type=Path, help="JSON lines, a cell each: those in it are not run again, new ones added"
    )
    zoo.add_argument("--page", type=Path, help="write the tables of all results to this file, in Markdown")
    zoo.set_defaults(run=run_zoo)


def run_zoo(chosen: argparse.Namespace) -> int:
    """Print the table; exit code 1 if anything is wrong."""
    names = chosen.only.split(",") if chosen.only else _names(chosen.family)
    for name in [name for name in names if name not in _names("all")]:
        make_model(name)  # an unknown name is an error before anything is run
    meshes, plans = chosen.mesh or list(GLOO_MESHES if chosen.gloo else MESHES), chosen.plans.split(",")
    before = _read(chosen.results)
    done = {(item.architecture, item.mesh, item.plan) for item in before}
    prefix = GLOO if chosen.gloo else ""
    cells: dict[str, dict[str, list[str]]] = {}
    for name, mesh, plan in product(names, meshes, plans):
        if (name, prefix + mesh, plan) not in done:
            cells.setdefault(name, {}).setdefault(mesh, []).append(plan)
    total = sum(len(some) for by_mesh in cells.values() for some in by_mesh.values())
    console = Console(stderr=True)
    run = check_on_ranks if chosen.gloo else check_virtually
    outcomes = []
    for outcome in track(
        run(cells, hardware=chosen.hardware), "zoo", total, console=console, disable=not console.is_terminal
    ):
        outcomes.append(outcome)
        _append(chosen.results, outcome)
    wanted = {(name, prefix + mesh, plan) for name in names for mesh in meshes for plan in plans}
    shown = [item for item in before if (item.architecture, item.mesh, item.plan) in wanted] + outcomes
    _show(shown, as_json=chosen.json)
    if chosen.page:
        write_page([*before, *outcomes], chosen.page)
    return int(any(outcome.verdict == "wrong" for outcome in shown))


def _names(family: str) -> list[str]:
    return [name for item in FAMILIES for name in names_of(item)] if family == "all" else names_of(family)


def _read(path: Path | None) -> list[Outcome]:
    if path is None or not path.exists():
        return []
    return [Outcome(**json.loads(line)) for line in path.read_text().splitlines()]


def _append(path: Path | None, outcome: Outcome) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")


def _show(outcomes: Sequence[Outcome], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"outcomes": [asdict(outcome) for outcome in outcomes]}))
        return
    Console().print(_table(outcomes))
    for line in _remarks(outcomes):
        print(line)


def _table(outcomes: Sequence[Outcome]) -> Table:
    plans = list(dict.fromkeys(outcome.plan for outcome in outcomes))
    table = Table("architecture", "mesh", *plans)
    cells = {(item.architecture, item.mesh, item.plan): item.verdict for item in outcomes}
    for architecture, mesh in dict.fromkeys((item.architecture, item.mesh) for item in outcomes):
        table.add_row(architecture, mesh, *(cells.get((architecture, mesh, plan), "") for plan in plans))
    return table


def _remarks(outcomes: Iterable[Outcome]) -> Iterator[str]:
    listed = list(outcomes)
    for item in listed:
        if item.verdict != "verified":
            yield f"{item.architecture} {item.mesh} {item.plan}: {item.verdict}: {item.detail}"
    verified = sum(item.verdict == "verified" for item in listed)
    yield f"{verified} of {len(listed)} verified"
