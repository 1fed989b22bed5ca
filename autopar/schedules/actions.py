"""What a pipeline schedule is: for each rank a list of actions, in the order in which the rank runs them.

A *stage* is a piece of the model; every stage has a number, and `virtual_stages` of them live on each rank. A generator
writes a schedule, `check_schedule` proves it, `simulate_schedule` prices it, the executor runs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from autopar.errors import ScheduleError

ComputeKind: TypeAlias = Literal["forward", "backward", "backward_input", "backward_weight"]
TransferKind: TypeAlias = Literal["send_activation", "recv_activation", "send_gradient", "recv_gradient"]
WeightKind: TypeAlias = Literal["optimizer_step", "stash_weights", "restore_weights", "drop_weights"]
ActionKind: TypeAlias = ComputeKind | TransferKind | WeightKind
Placement: TypeAlias = Literal["loop", "v"]
Edge: TypeAlias = tuple[int, int]  # a tensor of the first stage's forward is read by the second's

COMPUTE: tuple[ComputeKind, ...] = ("forward", "backward", "backward_input", "backward_weight")
SENDS: tuple[TransferKind, ...] = ("send_activation", "send_gradient")
RECVS: tuple[TransferKind, ...] = ("recv_activation", "recv_gradient")
TRANSFERS: tuple[TransferKind, ...] = SENDS + RECVS
OF_BACKWARD: tuple[ActionKind, ...] = (
    "backward", "backward_input", "backward_weight", "send_gradient", "recv_gradient",
)  # fmt: skip
NONE = -1  # no peer, no version, no microbatch


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a rank.

    - `forward`, `backward` (both halves at once), `backward_input` (gradients of the stage's inputs) and
      `backward_weight` (gradients of its parameters, added to those of earlier microbatches): of one stage for one
      microbatch. They run with the stage's newest weights, but right after a `restore_weights` of the stage.
    - `send_activation`, `recv_activation`: what the forward of the *earlier* stage gives to the *later* one.
      `send_gradient`, `recv_gradient`: what the backward of the later stage gives back. `stage` is the one at this end,
      `peer` the one at the other. A send is issued, not waited for. A recv is issued here, and waited for by its reader
      at the latest. The n-th send from one rank to another meets the n-th recv there; waiting for each transfer where
      it stands never deadlocks, so neither does anything laxer, such as one batch for consecutive transfers.
    - `optimizer_step`: apply the gradients gathered since the last one to the newest weights, which become `version`.
    - `stash_weights`: keep a copy of the newest weights, which are `version`, because a later action needs them after
      the next update. `drop_weights`: free that copy.
    - `restore_weights`: the next compute action of this stage runs with the stashed `version`, that one alone.

    A compute action of an asynchronous schedule also names the `version` of weights it runs with. Versions count a
    stage's updates: 0 are the weights at the start.
    """

    kind: ActionKind
    stage: int
    microbatch: int
    peer: int = NONE
    version: int = NONE

    def __str__(self) -> str:
        peer = f" {'to' if self.kind in SENDS else 'from'} {self.peer}" if self.peer != NONE else ""
        version = f" version {self.version}" if self.version != NONE else ""
        item = f" microbatch {self.microbatch}" if self.microbatch != NONE else ""
        return f"{self.kind} stage {self.stage}{item}{peer}{version}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Every rank's actions for `microbatches` microbatches through `stages` stages: all of them, virtual ones too.

    A synchronous schedule ends with all gradients gathered and leaves the update to the user's optimizer. An
    asynchronous one updates each stage after every `update_every` microbatches, and owns the optimizer.
    """

    name: str
    stages: int
    microbatches: int
    virtual_stages: int  # stages of one rank
    ranks: tuple[tuple[Action, ...], ...]
    placement: Placement = "loop"
    update_every: int = 0  # 0: synchronous
    edges: tuple[Edge, ...] = ()  # which stage reads of which: each of the one before, and skip connections

    def __post_init__(self) -> None:
        if not self.edges:
            object.__setattr__(self, "edges", chain(self.stages))
        if self.stages != len(self.ranks) * self.virtual_stages:
            raise ScheduleError(
                f"{self.name}: {self.stages} stages are not {len(self.ranks)} ranks x "
                f"{self.virtual_stages} virtual stages",
                fix="give every rank the same number of stages",
            )

    @property
    def synchronous(self) -> bool:
        """Whether the update is left to the user's optimizer, after the last microbatch."""
        return self.update_every == 0

    def stage_of(self, rank: int, chunk: int) -> int:
        """The stage that is this rank's `chunk`-th, counted along the model."""
        return stage_of(rank, chunk, len(self.ranks), self.placement)

    def rank_of(self, stage: int) -> int:
        """The rank on which a stage lives."""
        return rank_of(stage, len(self.ranks), self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, along the model."""
        return tuple(self.stage_of(rank, chunk) for chunk in range(self.virtual_stages))


def stage_of(rank: int, chunk: int, ranks: int, placement: Placement) -> int:
    """`loop`: the stages go around the ranks. `v`: back and forth, so that the last rank's two are neighbours."""
    back = placement == "v" and chunk % 2 == 1
    return chunk * ranks + (ranks - 1 - rank if back else rank)


def rank_of(stage: int, ranks: int, placement: Placement) -> int:
    """The rank on which a stage lives: the inverse of `stage_of`."""
    chunk, place = divmod(stage, ranks)
    return ranks - 1 - place if placement == "v" and chunk % 2 == 1 else place


def chain(stages: int) -> tuple[Edge, ...]:
    """Each stage reads of the one before."""
    return tuple((stage, stage + 1) for stage in range(stages - 1))


def halves(actions: Iterable[Action]) -> tuple[list[Action], list[Action]]:
    """A synchronous list as its forwards, and then its backwards: where the loss is computed of all the outputs."""
    listed = list(actions)
    forward = [action for action in listed if action.kind not in OF_BACKWARD]
    return forward, [action for action in listed if action.kind in OF_BACKWARD]
