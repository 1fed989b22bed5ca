"""What a rank holds while it runs its list: microbatches in flight, and bytes.

Takes in a schedule and what each stage holds; gives back the peak of each rank, and the action at which it is reached.
A rank runs its list in order, so the peak does not depend on times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from autopar.errors import MemoryLimitError
from autopar.schedules.actions import Action, ComputeKind, Schedule

_SENT_BY = {"forward": "activation", "backward": "gradient", "backward_input": "gradient"}


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage on one of its devices."""

    fixed_bytes: float = 0.0  # weights, optimizer state
    activation_bytes: float = 0.0  # of one microbatch, from its forward to its backward
    weight_share: float = 1.0  # of them, what the gradient of the weights still needs after that of the inputs
    version_bytes: float = 0.0  # one stashed version of the weights
    input_bytes: float = 0.0  # of one microbatch that has been received, until its forward
    gradient_bytes: float = 0.0  # of one microbatch that has been received, until its backward
    sent_bytes: float = 0.0  # of what the forward gives to other stages, beside the activations, until all have it
    sent_gradient_bytes: float = 0.0  # the same of the whole backward
    sent_beside_bytes: float = 0.0  # the same of its first half, beside what the second needs
    output_bytes: float = 0.0  # of one microbatch's results, until the end
    sum_bytes: float = 0.0  # gradients of the weights, from the first backward on
    adding_bytes: float = 0.0  # beyond, while the second microbatch's gradients are added
    reducing_bytes: float = 0.0  # beyond, while gradients are summed over the ranks after the last microbatch
    working: Mapping[ComputeKind, float] = field(default_factory=lambda: MappingProxyType({}))
    """At the peak of an action of each kind, all that it takes, makes and leaves behind."""

    @property
    def standing_bytes(self) -> float:
        """What there is to hold however few microbatches are in flight, and while one is computed."""
        arriving, leaving = self.input_bytes + self.gradient_bytes, self.sent_bytes + self.sent_gradient_bytes
        beyond = max([*self.working.values(), self.activation_bytes]) - self.activation_bytes
        return self.fixed_bytes + self.sum_bytes + self.adding_bytes + max(arriving + leaving, beyond)


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
        walk = _Walk(schedule, rank, by_stage)
        peak = Peak(walk.held, None)
        for action in actions:
            most = walk.act(action)
            if most > peak.bytes:
                peak = Peak(most, action)
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


class _Walk:
    """A rank on its way through its list. `held`: its bytes after the actions so far."""

    def __init__(self, schedule: Schedule, rank: int, memory: Mapping[int, StageMemory]) -> None:
        self.schedule, self.rank, self.memory = schedule, rank, memory
        self.held = sum(memory[stage].fixed_bytes for stage in schedule.stages_of(rank))
        self.received: dict[tuple[str, int, int], int] = {}
        self.unread: dict[tuple[str, int, int], tuple[int, float]] = {}  # stages that do not have it yet, bytes
        self.sent = 0.0  # the last message: it is kept until another is sent or has come
        self.added: dict[int, int] = {}  # microbatches in each stage's sum of gradients

    def act(self, action: Action) -> float:
        """Do one action; the most that is held while it runs."""
        one, item = self.memory[action.stage], (action.stage, action.microbatch)
        match action.kind:
            case "recv_activation" | "recv_gradient":
                return self._receive(action, one)
            case "send_activation" | "send_gradient":
                self._has(action.kind.removeprefix("send_"), *item, away=True)
                return self.held
            case "forward" | "backward" | "backward_input" | "backward_weight":
                return self._compute(action, action.kind, one)
            case "stash_weights":
                self.held += one.version_bytes
                return self.held
            case "drop_weights":
                self.held -= one.version_bytes
                return self.held + one.version_bytes
            case "optimizer_step":
                before = self.held
                self.held -= one.sum_bytes if self.added.pop(action.stage, 0) else 0.0
                return before
        return self.held

    def _receive(self, action: Action, one: StageMemory) -> float:
        kind = action.kind.removeprefix("recv_")
        key = kind, action.stage, action.microbatch
        self.received[key] = self.received.get(key, 0) + 1
        self.held += one.input_bytes if kind == "activation" else one.gradient_bytes
        return self.held

    def _compute(self, action: Action, kind: ComputeKind, one: StageMemory) -> float:
        stage, item = action.stage, action.microbatch
        kept = one.weight_share * one.activation_bytes
        taken = self._taken(kind, one, stage, item)
        taken += {"forward": 0.0, "backward_weight": kept}.get(kind, one.activation_bytes)
        sent = {"forward": one.sent_bytes, "backward": one.sent_gradient_bytes,
                "backward_input": one.sent_beside_bytes}.get(kind, 0.0)  # fmt: skip
        left = {"forward": one.activation_bytes + one.output_bytes, "backward_input": kept}.get(kind, 0.0)
        given, added = sent + left, 0.0
        if kind in ("backward", "backward_weight"):
            count = self.added.get(stage, 0)
            self.added[stage] = count + 1
            given += one.sum_bytes if count == 0 else 0.0
            added = one.sum_bytes + sent + (one.adding_bytes if count == 1 else 0.0)
        touched = one.working.get(kind, taken + given if kind == "forward" else 0.0)
        most = self.held - taken + max(touched, taken, given, added)
        self.held += given - taken
        if self.added.get(stage, 0) == (self.schedule.update_every or self.schedule.microbatches):
            most = max(most, self.held + one.reducing_bytes)
        if kind in _SENT_BY:
            ends = 0 if kind == "forward" else 1
            readers = sum(edge[ends] == stage for edge in self.schedule.edges)
            self.unread[_SENT_BY[kind], stage, item] = readers, sent
        return most

    def _taken(self, kind: ComputeKind, one: StageMemory, stage: int, item: int) -> float:
        """What an action consumes of other stages: what was received, and what was made on this rank."""
        if kind == "backward_weight":
            return 0.0
        what, own, other = ("activation", 1, 0) if kind == "forward" else ("gradient", 0, 1)
        for edge in self.schedule.edges:
            if edge[own] == stage and self.schedule.rank_of(edge[other]) == self.rank:
                self._has(what, edge[other], item, away=False)
        each = one.input_bytes if kind == "forward" else one.gradient_bytes
        count = self.received.pop((what, stage, item), 0)
        if count:
            self._let_go_of_sent()
        return each * count

    def _has(self, what: str, stage: int, item: int, *, away: bool) -> None:
        """One more stage has what `stage` gave for a microbatch."""
        key = what, stage, item
        readers, bytes_ = self.unread.get(key, (0, 0.0))
        if readers > 1:
            self.unread[key] = readers - 1, bytes_
        if readers != 1:
            return
        del self.unread[key]
        if not away:
            self.held -= bytes_
            return
        self._let_go_of_sent()
        self.sent = bytes_

    def _let_go_of_sent(self) -> None:
        self.held -= self.sent
        self.sent = 0.0
