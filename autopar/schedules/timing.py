"""A schedule's price: when every action starts and ends, by simulation of its lists.

Takes in a schedule and stage times; gives back a simulation, from which step time, bubbles and traces follow. Results
flow to other ranks by sends, each rank's to each other rank on a stream of its own, beside its compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from autopar.cost_models.pipeline import StageTimes
from autopar.cost_models.simulator import Simulation, TimedOp, simulate
from autopar.schedules.actions import Action, ComputeKind, Schedule
from autopar.schedules.dependencies import Dependencies, Key, compute_actions, compute_kind, result_of

_SECONDS: Mapping[ComputeKind, Callable[[StageTimes], float]] = MappingProxyType(
    {
        "forward": lambda one: one.forward_s,
        "backward": lambda one: one.backward_input_s + one.backward_weight_s,
        "backward_input": lambda one: one.backward_input_s,
        "backward_weight": lambda one: one.backward_weight_s,
    }
)


def simulate_schedule(
    schedule: Schedule,
    times: StageTimes | Mapping[int, StageTimes],
    *,
    rank_speeds: Sequence[float] = (),
) -> Simulation:
    """Run a schedule. Work on weight versions and updates takes no time here; recvs wait in their readers.

    `times` is of one rank's microbatch (split evenly over its stages), or of each stage.
    """
    by_stage = times if isinstance(times, Mapping) else even_times(schedule, times)
    return simulate(_timed_ops(schedule, by_stage), rank_speeds=rank_speeds)


def even_times(schedule: Schedule, times: StageTimes) -> dict[int, StageTimes]:
    """A rank's times shared evenly by its stages; a send stays whole."""
    chunks = schedule.virtual_stages
    one = StageTimes(times.forward_s / chunks, times.backward_input_s / chunks, times.backward_weight_s / chunks,
                     times.send_s)  # fmt: skip
    return dict.fromkeys(range(schedule.stages), one)


def action_seconds(action: Action, times: Mapping[int, StageTimes]) -> float:
    """What a compute action takes."""
    return _SECONDS[compute_kind(action)](times[action.stage])


def longest_rank_seconds(simulation: Simulation) -> float:
    """From a rank's first op to its last, of the rank for which that is longest: what a step costs when the optimizer
    step needs no barrier (Qi et al., section 4)."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for op, start, end in zip(simulation.ops, simulation.starts_s, simulation.ends_s, strict=True):
        if op.kind == "compute":
            first[op.rank] = min(first.get(op.rank, float("inf")), float(start))
            last[op.rank] = max(last.get(op.rank, 0.0), float(end))
    return max(last[rank] - first[rank] for rank in first)


def bubble_fraction(simulation: Simulation) -> float:
    """The share of the step, over all ranks, in which none of them computes."""
    ranks = len(simulation.compute_s)
    return 1 - sum(simulation.compute_s.values()) / (ranks * simulation.step_s) if simulation.step_s else 0.0


def _timed_ops(schedule: Schedule, times: Mapping[int, StageTimes]) -> list[TimedOp]:
    """Each compute action, followed by its sends: one for each reading stage on another rank."""
    links, index = Dependencies(schedule.edges), _places(schedule)
    ops: list[TimedOp] = []
    for rank, actions in enumerate(schedule.ranks):
        for action in compute_actions(actions):
            reads = tuple(index.get((key, action.stage), index[key, key[1]]) for key in links.needs(action))
            name = f"{action.kind} {action.stage}.{action.microbatch}"
            ops.append(TimedOp(name, action_seconds(action, times), "compute", rank, "compute", reads))
            made = len(ops) - 1
            for stage in remote_readers(schedule, links, action):
                way = f"to rank {schedule.rank_of(stage)}"
                ops.append(TimedOp(f"send {name}", times[action.stage].send_s, "communication", rank, way, (made,)))
    return ops


def remote_readers(schedule: Schedule, links: Dependencies, action: Action) -> list[int]:
    """The stages on other ranks that read what a compute action gives."""
    own = schedule.rank_of(action.stage)
    return [stage for stage in links.peers(action) if schedule.rank_of(stage) != own]


def _places(schedule: Schedule) -> dict[tuple[Key, int], int]:
    """By result and reading stage: the index of the op that brings it there. Under its own stage: the action itself."""
    links, index, count = Dependencies(schedule.edges), {}, 0
    for actions in schedule.ranks:
        for action in compute_actions(actions):
            key = result_of(action)
            for stage in (action.stage, *remote_readers(schedule, links, action)):
                index[key, stage] = count
                count += 1
    return index
