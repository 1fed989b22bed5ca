"""What a rank holds while it runs its list: microbatches in flight, and bytes.

Takes in a schedule and what each stage holds; gives back the peak of each rank, and the action at which it is reached.
A rank runs its list in order, so the peak does not depend on times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import MemoryLimitError
from autopar.schedules.actions import Action, Schedule


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage on one of its devices."""

    fixed_bytes: float = 0.0  # weights, gradients, optimizer state
    activation_bytes: float = 0.0  # of one microbatch, from its forward to its backward
    weight_share: float = 1.0  # of them, what the gradient of the weights still needs after that of the inputs
    version_bytes: float = 0.0  # one stashed version of the weights
    input_bytes: float = 0.0  # of one microbatch that has been received, until its forward
    gradient_bytes: float = 0.0  # of one microbatch that has been received, until its backward


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a rank holds at once, and the action during which it does."""

    bytes: float
    action: Action | None


def peaks(schedule: Schedule, memory: StageMemory | Mapping[int, StageMemory]) -> tuple[Peak, ...]:
    """The peak of every rank."""
    by_stage = memory if isinstance(memory, Mapping) else dict.fromkeys(range(schedule.stages), memory)
    found = []
    for rank, actions in enumerate(schedule.ranks):
        held = sum(by_stage[stage].fixed_bytes for stage in schedule.stages_of(rank))
        peak = Peak(held, None)
        for action, taken, given in _changes(actions, by_stage):
            held += taken
            if held > peak.bytes:
                peak = Peak(held, action)
            held -= given
        found.append(peak)
    return tuple(found)


def check_memory(
    schedule: Schedule, memory: StageMemory | Mapping[int, StageMemory], limits_bytes: Sequence[float]
) -> None:
    """Raise if a rank holds more than its limit at some action."""
    for rank, (peak, limit) in enumerate(zip(peaks(schedule, memory), limits_bytes, strict=True)):
        if peak.bytes > limit * (1 + 1e-9):
            raise MemoryLimitError(
                f"{schedule.name}: rank {rank} holds {peak.bytes:.4g} bytes, {peak.bytes - limit:.4g} above its limit",
                where=str(peak.action) if peak.action else "what its stages always hold",
                fix="use a schedule with fewer microbatches in flight, smaller microbatches, or more stages",
            )


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """By stage: the most microbatches whose activations are held at once, wholly or for their weight gradients."""
    most = []
    for stage in range(schedule.stages):
        alive = peak = 0
        for action in schedule.ranks[schedule.rank_of(stage)]:
            if action.stage == stage:
                alive += {"forward": 1, "backward": -1, "backward_weight": -1}.get(action.kind, 0)
                peak = max(peak, alive)
        most.append(peak)
    return tuple(most)


def _changes(actions: Sequence[Action], memory: Mapping[int, StageMemory]) -> Iterator[tuple[Action, float, float]]:
    """Bytes that each action takes when it begins, and gives back when it ends."""
    received: dict[tuple[str, int, int], int] = {}
    for action in actions:
        one, item = memory[action.stage], (action.stage, action.microbatch)
        taken = given = 0.0
        if action.kind in ("recv_activation", "recv_gradient"):
            received[action.kind, *item] = received.get((action.kind, *item), 0) + 1
            taken = one.input_bytes if action.kind == "recv_activation" else one.gradient_bytes
        elif action.kind == "forward":
            taken = one.activation_bytes
            given = one.input_bytes * received.get(("recv_activation", *item), 0)
        elif action.kind in ("backward", "backward_input"):
            share = 1.0 if action.kind == "backward" else 1 - one.weight_share
            given = share * one.activation_bytes + one.gradient_bytes * received.get(("recv_gradient", *item), 0)
        elif action.kind == "backward_weight":
            given = one.weight_share * one.activation_bytes
        elif action.kind == "stash_weights":
            taken = one.version_bytes
        elif action.kind == "drop_weights":
            given = one.version_bytes
        yield action, taken, given
