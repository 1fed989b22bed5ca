"""The sub-command `schedule`: make a pipeline schedule, prove it, and show it as chart, picture or trace."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from autopar.cost_models.pipeline import StageTimes
from autopar.errors import UnsupportedOptionError
from autopar.schedules.actions import Schedule
from autopar.schedules.chart import save_picture, summary, text_chart
from autopar.schedules.check import check_schedule
from autopar.schedules.generate import GENERATORS, Request, generate
from autopar.schedules.memory import StageMemory, in_flight
from autopar.schedules.timing import bubble_fraction, longest_rank_seconds, simulate_schedule


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `schedule` to the command line."""
    names = "; ".join(f"{name}: {generator.about}" for name, generator in GENERATORS.items())
    parser = subparsers.add_parser(
        "schedule",
        help="make, check and show a pipeline schedule",
        description=f"Schedules: {names}.",
        epilog="example: autopar schedule --name zb-h1 --stages 4 --microbatches 8 --chart",
    )
    parser.add_argument("--name", default="auto", help=f"one of: {', '.join(GENERATORS)}")
    parser.add_argument("--stages", type=int, required=True, help="all of them, virtual ones included")
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--virtual-stages", type=int, help="stages of each rank (default: the fewest admitted)")
    parser.add_argument("--update-every", type=int, default=0, help="microbatches for each update of pipedream-2bw")
    parser.add_argument("--f", type=float, default=1.0, metavar="SECONDS", help="forward of a rank's microbatch")
    parser.add_argument("--b", type=float, default=1.0, metavar="SECONDS", help="backward for its inputs")
    parser.add_argument("--w", type=float, default=1.0, metavar="SECONDS", help="backward for its weights")
    parser.add_argument("--comm", type=float, default=0.0, metavar="SECONDS", help="one send between stages")
    parser.add_argument("--activation-bytes", type=float, default=0.0, help="of one microbatch in one stage")
    parser.add_argument("--memory", type=float, metavar="BYTES", help="the limit of every rank, for activations")
    parser.add_argument("--chart", action="store_true", help="print the chart")
    parser.add_argument("--actions", action="store_true", help="print every rank's actions")
    parser.add_argument("--png", type=Path, metavar="FILE", help="save the chart as a picture (matplotlib)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="save a trace for ui.perfetto.dev")
    parser.set_defaults(run=run_schedule)


def run_schedule(options: argparse.Namespace) -> int:
    """Make the schedule, check it, print and save what was asked for."""
    request = _request(options)
    schedule = generate(options.name, request)
    check_schedule(schedule, memory=request.memory if options.memory else None, limits_bytes=request.limits_bytes)
    simulation = simulate_schedule(schedule, request.times)
    if options.png:
        save_picture(schedule, simulation, options.png)
    if options.trace:
        simulation.save_trace(options.trace)
    if getattr(options, "json", False):
        print(json.dumps({
            "name": schedule.name, "stages": schedule.stages, "ranks": len(schedule.ranks),
            "step_s": simulation.step_s, "longest_rank_s": longest_rank_seconds(simulation),
            "bubble_fraction": bubble_fraction(simulation), "in_flight": in_flight(schedule),
            "actions": _actions(schedule) if options.actions else None,
        }))  # fmt: skip
        return 0
    print(summary(schedule, simulation, request.memory))
    if options.chart:
        print(text_chart(schedule, simulation))
    for rank, actions in enumerate(_actions(schedule) if options.actions else ()):
        print(f"rank {rank}", *actions, sep="\n  ")
    return 0


def _request(options: argparse.Namespace) -> Request:
    generator = GENERATORS.get(options.name)
    virtual = options.virtual_stages or (generator.virtual_stages.start if generator else 1)
    if options.memory and not options.activation_bytes:
        raise UnsupportedOptionError("--memory without --activation-bytes limits nothing", fix="give both")
    memory = StageMemory(activation_bytes=options.activation_bytes)
    limits = [options.memory] * (options.stages // virtual) if options.memory else ()
    times = StageTimes(options.f, options.b, options.w, options.comm)
    return Request(options.stages, options.microbatches, virtual, options.update_every, times, memory, limits)


def _actions(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in actions] for actions in schedule.ranks]
