"""Adds sends and recvs to a schedule that only computes, so that no order of waiting for them can deadlock.

All transfers of all ranks follow one order in time, that of the simulated run. Each is added to its sender and its
receiver at that moment. So there is one sequence of all computations and transfers that every rank's list agrees with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from autopar.cost_models.pipeline import StageTimes
from autopar.schedules.actions import COMPUTE, TRANSFERS, Action, Schedule
from autopar.schedules.dependencies import Dependencies, causal_order, compute_actions
from autopar.schedules.timing import even_times, remote_readers, simulate_schedule

UNIT = StageTimes(1.0, 1.0, 1.0, 0.05)
_START, _END = 0, 1


def add_transfers(schedule: Schedule, times: StageTimes | Mapping[int, StageTimes] = UNIT) -> Schedule:
    """The schedule with its transfers; `times`, as in `simulate_schedule`, order those of different ranks."""
    bare = replace(schedule, ranks=tuple(tuple(compute_actions(actions)) for actions in schedule.ranks))
    by_stage = times if isinstance(times, Mapping) else even_times(schedule, times)
    order = {(rank, action): place for place, (rank, action) in enumerate(causal_order(bare))}
    events = _events(bare, by_stage, order)
    links, lists = Dependencies(schedule.edges), [list[Action]() for _ in schedule.ranks]
    before, after = _weight_work(schedule)
    for _, _, moment, rank, action in sorted(events, key=lambda event: event[:3]):
        if moment == _START:
            lists[rank] += [*before.get(action, ()), action]
            continue
        for stage in remote_readers(schedule, links, action):
            send, recv = transfer(action, stage)
            lists[rank].append(send)
            lists[schedule.rank_of(stage)].append(recv)
        lists[rank] += after.get(action, ())
    return replace(schedule, ranks=tuple(map(tuple, lists)))


def without_transfers(schedule: Schedule) -> Schedule:
    """The same schedule without sends and recvs."""
    kept = tuple(tuple(item for item in actions if item.kind not in TRANSFERS) for actions in schedule.ranks)
    return replace(schedule, ranks=kept)


def transfer(action: Action, reader: int) -> tuple[Action, Action]:
    """The two ends of carrying what a compute action gives to a stage that reads it."""
    item = action.microbatch
    if action.kind == "forward":
        return (
            Action("send_activation", action.stage, item, peer=reader),
            Action("recv_activation", reader, item, peer=action.stage),
        )
    return Action("send_gradient", action.stage, item, peer=reader), Action(
        "recv_gradient", reader, item, peer=action.stage
    )


_Beside = dict[Action, list[Action]]


def _weight_work(schedule: Schedule) -> tuple[_Beside, _Beside]:
    """Work on weights by the compute action that it stands before (to restore them), and after (all else)."""
    before: _Beside = defaultdict(list)
    after: _Beside = defaultdict(list)
    for actions in schedule.ranks:
        restored: list[Action] = []
        last: Action | None = None
        for action in actions:
            if action.kind in COMPUTE:
                before[action], last, restored = restored, action, []
            elif action.kind == "restore_weights":
                restored.append(action)
            elif action.kind not in TRANSFERS and last is not None:
                after[last].append(action)
    return before, after


_Event = tuple[float, int, int, int, Action]  # time, place in the causal order, moment, rank, action


def _events(bare: Schedule, times: Mapping[int, StageTimes], order: Mapping[tuple[int, Action], int]) -> list[_Event]:
    """Start and end of every action. Time never runs against the causal order, so sorting by both respects it."""
    simulation = simulate_schedule(bare, times)
    computed = [
        (float(start), float(end))
        for op, start, end in zip(simulation.ops, simulation.starts_s, simulation.ends_s, strict=True)
        if op.kind == "compute"
    ]
    actions = [(rank, action) for rank, actions in enumerate(bare.ranks) for action in actions]
    events: list[_Event] = []
    for (rank, action), (start, end) in zip(actions, computed, strict=True):
        place = order[rank, action]
        events += [(start, place, _START, rank, action), (end, place, _END, rank, action)]
    return events
