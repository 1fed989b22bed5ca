"""The sub-command `place-experts` of `python -m autopar`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from autopar.errors import ExpertPlacementError
from autopar.search.experts.place import place_experts


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command; it sets `run`, a function of the parsed arguments that returns the exit status."""
    parser = subparsers.add_parser(
        "place-experts",
        help="choose the devices of a mixture's experts from their loads (JSON or .npy)",
        epilog="example: autopar place-experts loads.json --mesh 2x8 --replicas 72 --save placement.json",
    )
    parser.add_argument("load", type=Path, help="tokens by layer and expert: a list of lists, or {load, affinity}")
    parser.add_argument("--mesh", required=True, help="nodes x devices per node, as 8x8")
    parser.add_argument("--replicas", type=int, default=None, help="expert slots in all, by layer")
    parser.add_argument("--current", type=Path, default=None, help="an earlier answer, as --save wrote it")
    parser.add_argument("--move-cost", type=float, default=0.0, metavar="LOAD", help="load that a move must save")
    parser.add_argument("--time-limit", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--why", default=None, metavar="LAYER:EXPERT", help="tell why this expert is where it is")
    parser.add_argument("--save", type=Path, default=None, help="write the placement there, as JSON")
    parser.set_defaults(run=run_place)


def run_place(args: argparse.Namespace) -> int:
    """Place, print, and save if asked to."""
    given = _read(args.load)
    known = given if isinstance(given, dict) else {"load": given}
    if "load" not in known:
        raise ExpertPlacementError(f"{args.load} has no 'load'", fix="give a list of lists, or an object with load")
    current = None if args.current is None else _assignment(args.current)
    placement = place_experts(
        known["load"],
        _mesh(args.mesh),
        replicas=args.replicas,
        affinity=known.get("affinity"),
        current=current,
        move_cost=args.move_cost,
        time_limit_s=args.time_limit,
    )
    text = json.dumps(placement.to_dict())
    if args.save is not None:
        args.save.write_text(text)
    print(text if args.json else placement)
    if args.why is not None and not args.json:
        print(placement.why(*_expert(args.why)))
    return 0


def _expert(text: str) -> tuple[int, int]:
    layer, _, expert = text.partition(":")
    try:
        return int(layer), int(expert)
    except ValueError as error:
        raise ExpertPlacementError(f"{text!r} names no expert", fix="write layer and expert, as 0:3") from error


def _mesh(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.lower().split("x"))
    except ValueError as error:
        raise ExpertPlacementError(f"mesh {text!r} has no shape", fix="write sizes by axis, as 8x8") from error


def _read(path: Path) -> Any:
    try:
        return np.load(path) if path.suffix == ".npy" else json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ExpertPlacementError(
            f"{path} cannot be read: {error}", fix="give JSON, or an array saved as .npy"
        ) from error


def _assignment(path: Path) -> Any:
    given = _read(path)
    if not isinstance(given, dict) or "assignment" not in given:
        raise ExpertPlacementError(f"{path} has no 'assignment'", fix="give a file that --save wrote")
    return np.array(given["assignment"])
