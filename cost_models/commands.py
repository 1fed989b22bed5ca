"""The sub-command `calibrate`: measure this machine and write its hardware profile."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from autopar.cost_models.formula import quantity
from autopar.cost_models.hardware import HardwareProfile, load_profile


def add_commands(subparsers: Any) -> None:
    """Add `calibrate` to the command line."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure this machine and write a hardware profile",
        description="Measure this machine's matmuls, memory and, under torchrun, its collectives. "
        "Write a hardware profile that `--hardware FILE` and `hardware=` take.",
        epilog="example: torchrun --nproc-per-node 8 -m autopar calibrate --output hardware.json",
    )
    parser.add_argument("--output", type=Path, default=Path("hardware.json"), help="default: hardware.json")
    parser.add_argument("--base", help="a profile for what cannot be measured (default: the device's own)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to measure (default 60); more is better "
                        "where other work runs on the machine")  # fmt: skip
    parser.set_defaults(run=run_calibrate)


def run_calibrate(options: argparse.Namespace) -> int:
    """Calibrate, write the profile from rank 0, print the residuals."""
    from autopar.cost_models.calibrate import calibrate, measurement_names
    from autopar.cost_models.measuring import launched_world

    base = load_profile(options.base) if options.base else None
    with launched_world() as world:
        first = world.rank == 0
        with _progress(measurement_names(world) if first else []) as report:
            profile = calibrate(world, base=base, most_s=options.seconds, report=report)
        if first:
            options.output.write_text(profile.to_json())
            _print(profile, options)
    return 0


@contextmanager
def _progress(names: Any) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error that moves with each reported name."""
    with Progress(console=Console(stderr=True), disable=not names) as bar:
        task = bar.add_task("calibrate", total=len(names) or 1, completed=-1)

        def report(name: str) -> None:
            bar.update(task, advance=1, description=name)

        yield report
        bar.update(task, completed=len(names) or 1, description="done")


def _print(profile: HardwareProfile, options: argparse.Namespace) -> None:
    if getattr(options, "json", False):
        print(json.dumps({"profile": str(options.output), "residuals": dict(profile.residuals)}))
        return
    device, console = profile.device, Console()
    table = Table(title=f"{profile.name}: {profile.source}")
    table.add_column("measured")
    table.add_column("value")
    for dtype, curve in sorted(device.matmul.items()):
        table.add_row(f"matmul {dtype}", quantity(device.peak_flops[dtype] * curve.efficiency, "FLOP/s"))
    table.add_row("memory", quantity(device.memory_bytes_per_s * device.memory_efficiency, "B/s"))
    table.add_row("kernel launch", quantity(device.launch_s, "s"))
    for place, link in (("link inside a node", profile.intra), ("link between nodes", profile.inter)):
        if "calibrate" in link.source:
            table.add_row(place, f"{quantity(link.bytes_per_s, 'B/s')}, {quantity(link.latency_s, 's')} a hop")
    for name, residual in profile.residuals.items():
        table.add_row(f"median error of {name}", f"{100 * residual:.0f} %")
    console.print(table)
    console.print(f"written to {options.output}")
