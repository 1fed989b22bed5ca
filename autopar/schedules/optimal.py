"""The shortest order of a small schedule's actions under its memory limits, by CP-SAT.

Takes in a schedule, whose stages stay where they are, with times and memory; gives back the same work in the best order
found, split backwards included. Deterministic: one worker, and a limit that is counted in work instead of seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost_models.pipeline import StageTimes
from autopar.schedules.actions import Action, ComputeKind, Schedule
from autopar.schedules.dependencies import Dependencies, compute_actions, compute_kind, result_of
from autopar.schedules.memory import StageMemory
from autopar.schedules.timing import action_seconds, simulate_schedule
from autopar.schedules.transfers import without_transfers

TICKS = 200  # of the longest action: the resolution of time
UNITS = 1_000_000  # of a memory limit: the resolution of bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """Memory of each stage, and the limit of each rank; no limits, no constraint."""

    memory: Mapping[int, StageMemory]
    limits_bytes: Sequence[float] = ()


def split_backwards(schedule: Schedule) -> Schedule:
    """Each backward as its two halves, one after the other."""
    return replace(schedule, ranks=tuple(tuple(_split(actions)) for actions in schedule.ranks))


def shortest(
    schedule: Schedule, times: Mapping[int, StageTimes], limits: Limits, *, effort: float = 0.5
) -> Schedule | None:
    """The order with the shortest longest rank; None if none was found within `effort`, in CP-SAT's deterministic time.

    Microbatches keep their order in each kind of action of a stage: with equal work, changing it gains nothing.
    """
    from ortools.sat.python import cp_model  # loads pandas, which few plans need

    bare = split_backwards(without_transfers(schedule))
    model = _Model(bare, times)
    model.limit_memory(limits)
    model.hint()
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    if solver.solve(model.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    lists = []
    for actions in bare.ranks:
        placed = sorted((solver.value(model.start[action]), order) for order, action in enumerate(actions))
        lists.append(tuple(actions[order] for _, order in placed))
    return replace(bare, name="optimal", ranks=tuple(lists))


class _Model:
    """Start times of all actions: no two of a rank at once, results before their readers, the longest rank least."""

    def __init__(self, schedule: Schedule, times: Mapping[int, StageTimes]) -> None:
        from ortools.sat.python import cp_model  # loads pandas, which few plans need

        self.schedule, self.times, self.model = schedule, times, cp_model.CpModel()
        self.actions = [action for actions in schedule.ranks for action in actions]
        longest_s = max(action_seconds(action, times) for action in self.actions)
        self.tick_s = longest_s / TICKS
        self.ticks = {action: self._ticks(action_seconds(action, times)) for action in self.actions}
        self.simulation = simulate_schedule(schedule, times)
        self.horizon = 2 * self._ticks(self.simulation.step_s) + len(self.actions)
        self.start = {action: self.model.new_int_var(0, self.horizon, str(action)) for action in self.actions}
        self._order()
        self._minimize()

    def limit_memory(self, limits: Limits) -> None:
        """What a rank's microbatches hold stays below its limit at every time."""
        for rank, limit in enumerate(limits.limits_bytes):
            free = limit - sum(limits.memory[stage].standing_bytes for stage in self.schedule.stages_of(rank))
            changes = [
                (self.start[action] + (0 if change > 0 else self.ticks[action]), change)
                for action in self.schedule.ranks[rank]
                if (change := self._change(action, limits, free))
            ]
            if changes:
                moments, amounts = zip(*changes, strict=True)
                self.model.add_reservoir_constraint(moments, amounts, -UNITS, UNITS)

    def hint(self) -> None:
        """Begin at the order given."""
        computed = [start for op, start in zip(self.simulation.ops, self.simulation.starts_s, strict=True)
                    if op.kind == "compute"]  # fmt: skip
        for action, start in zip(self.actions, computed, strict=True):
            self.model.add_hint(self.start[action], self._ticks(float(start)))

    def _order(self) -> None:
        links, giver = Dependencies(self.schedule.edges), {result_of(action): action for action in self.actions}
        previous: dict[tuple[str, int], Action] = {}
        for action in self.actions:
            for need in (giver[key] for key in links.needs(action)):
                away = self.schedule.rank_of(need.stage) != self.schedule.rank_of(action.stage)
                send = self._ticks(self.times[need.stage].send_s) if away else 0
                self.model.add(self.start[action] >= self.start[need] + self.ticks[need] + send)
        for action in sorted(self.actions, key=lambda item: item.microbatch):
            key = (action.kind, action.stage)
            if before := previous.get(key):
                self.model.add(self.start[action] >= self.start[before] + self.ticks[before])
            previous[key] = action
        for actions in self.schedule.ranks:
            self.model.add_no_overlap(
                [
                    self.model.new_fixed_size_interval_var(self.start[item], self.ticks[item], str(item))
                    for item in actions
                ]
            )

    def _minimize(self) -> None:
        longest = self.model.new_int_var(0, self.horizon, "longest")
        for actions in self.schedule.ranks:
            work = sum(self.ticks[action] for action in actions)
            self.model.add(longest >= work)
            for first in (item for item in actions if item.kind == "forward" and item.microbatch == 0):
                for last in (item for item in actions if item.microbatch == self.schedule.microbatches - 1):
                    if last.kind == "backward_weight":
                        self.model.add(longest >= self.start[last] + self.ticks[last] - self.start[first])
        self.model.minimize(longest)

    def _ticks(self, seconds: float) -> int:
        return round(seconds / self.tick_s)

    @staticmethod
    def _change(action: Action, limits: Limits, free: float) -> int:
        """Units of the rank's free memory, rounded down: whoever takes the order checks its bytes."""
        one = limits.memory[action.stage]
        taken = int(one.activation_bytes / free * UNITS) if free > 0 else UNITS + 1
        kept = round(one.weight_share * taken)
        changes: Mapping[ComputeKind, int] = {
            "forward": taken,
            "backward_input": kept - taken,
            "backward_weight": -kept,
        }
        return changes[compute_kind(action)]


def _split(actions: Sequence[Action]) -> Iterator[Action]:
    for action in compute_actions(actions):
        if action.kind == "backward":
            yield replace(action, kind="backward_input")
            yield replace(action, kind="backward_weight")
        else:
            yield action
