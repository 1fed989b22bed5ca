"""How values get from the rank of one stage to that of another: between processes, or within one.

Messages between two ranks are matched in order. Those that go up the ranks and those that go down have process groups
of their own, so that on each link of a backend with one queue per pair (NCCL) all messages go one way, and none waits
for one behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import RankFailedError
from autopar.runtime.pipeline.lanes import Value, VirtualLanes
from autopar.schedules.actions import NONE


@dataclass(frozen=True, slots=True)
class Message:
    """What one stage gives to another for one microbatch: `kind` is `activation` or `gradient`. Without a microbatch,
    what one pipeline rank gives to another at the end."""

    kind: str
    source: int
    reader: int
    microbatch: int

    def __str__(self) -> str:
        if self.microbatch == NONE:
            return f"the {self.kind} from pipeline rank {self.source} to {self.reader}"
        return f"the {self.kind}s of microbatch {self.microbatch} from stage {self.source} to stage {self.reader}"


class Incoming(Protocol):
    """A message that was asked for."""

    def is_here(self) -> bool:
        """Whether `values` can be asked for without having others run first."""

    def values(self) -> list[Value]:
        """The values of the message, waited for."""


class Channels(Protocol):
    """Carries messages."""

    def send(self, message: Message, rank: int, values: Sequence[Value]) -> None:
        """Issue a send to a pipeline rank; it is not waited for."""

    def receive(self, message: Message, rank: int, like: Sequence[Sequence[Tensor]]) -> Incoming:
        """Ask for a message of a pipeline rank. `like`: per value, a fake tensor of each lane's part."""


@dataclass
class Mailbox:
    """Messages among virtual ranks that are under way."""

    messages: dict[Message, list[Value]] = field(default_factory=dict)


class VirtualLinks:
    """The channels of one virtual pipeline rank. It holds what real ones hold: a message that is asked for has its
    memory at once, and what was sent last is kept until another one is sent or has come."""

    def __init__(self, mailbox: Mailbox, lanes: VirtualLanes) -> None:
        self.mailbox, self.lanes = mailbox, lanes
        self.sent: list[Value] = []

    def send(self, message: Message, rank: int, values: Sequence[Value]) -> None:
        assert message not in self.mailbox.messages, f"{message} were sent twice"
        self.sent = [self.lanes.held([part.contiguous() for part in value]) for value in values]
        self.mailbox.messages[message] = [[part.clone() for part in value] for value in self.sent]

    def receive(self, message: Message, rank: int, like: Sequence[Sequence[Tensor]]) -> Incoming:
        empty = [self.lanes.held([torch.empty(fake.shape, dtype=fake.dtype) for fake in lanes]) for lanes in like]
        return _Boxed(self, message, empty)


@dataclass(frozen=True)
class _Boxed:
    links: VirtualLinks
    message: Message
    received: list[Value]

    def is_here(self) -> bool:
        return self.message in self.links.mailbox.messages

    def values(self) -> list[Value]:
        self.links.sent = []  # what was sent before this one came is there
        for value, parts in zip(self.received, self.links.mailbox.messages.pop(self.message), strict=True):
            for own, part in zip(value, parts, strict=True):
                own.copy_(part)
        return self.received


class Links:
    """Channels of this process to the ranks at the same place of other stages.

    `ranks`: the global rank of each pipeline rank here.
    """

    def __init__(self, ranks: Sequence[int], own: int, up: Any, down: Any, device: str) -> None:
        self.ranks, self.own, self.up, self.down, self.device = tuple(ranks), own, up, down, device
        self.counts: dict[tuple[int, int], int] = defaultdict(int)  # messages so far, by (from, to)
        self.sent: list[tuple[Any, Tensor, Message]] = []

    def send(self, message: Message, rank: int, values: Sequence[Value]) -> None:
        self.forget_completed()
        for (tensor,) in values:
            packed = tensor.contiguous()
            work = self._start(dist.isend, packed, self.own, rank, message)
            self.sent.append((work, packed, message))

    def receive(self, message: Message, rank: int, like: Sequence[Sequence[Tensor]]) -> Incoming:
        parts = []
        for (fake,) in like:
            tensor = torch.empty(fake.shape, dtype=fake.dtype, device=self.device)
            parts.append((self._start(dist.irecv, tensor, rank, self.own, message), tensor))
        return _Pending(message, parts, self.ranks[rank], self)

    def forget_completed(self) -> None:
        """Let go of what has been sent."""
        self.sent = [item for item in self.sent if not item[0].is_completed()]

    def finish(self) -> None:
        """Wait for all sends."""
        for work, _, message in self.sent:
            _wait(work, message, "another rank")
        self.sent.clear()

    def _start(self, call: Callable[..., Any], tensor: Tensor, source: int, target: int, message: Message) -> Any:
        peer = self.ranks[target if source == self.own else source]
        group = self.up if source < target else self.down
        tag = self.counts[source, target] if self.device == "cpu" else 0  # NCCL knows no tags, and keeps the order
        self.counts[source, target] += 1
        try:
            return call(tensor, peer, group=group, tag=tag)
        except RuntimeError as error:
            raise lost_rank(message, f"rank {peer}", error) from error


@dataclass(frozen=True)
class _Pending:
    message: Message
    parts: list[tuple[Any, Tensor]]
    peer: int
    links: Links

    def is_here(self) -> bool:
        return True

    def values(self) -> list[Value]:
        for work, _ in self.parts:
            _wait(work, self.message, f"rank {self.peer}")
        self.links.forget_completed()
        return [[tensor] for _, tensor in self.parts]


def _wait(work: Any, message: Message, peer: str) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise lost_rank(message, peer, error) from error


def lost_rank(message: object, peer: str, error: RuntimeError) -> RankFailedError:
    """What to raise when a transfer fails: a rank died, or did not come within the timeout of its process group."""
    first = str(error).strip().splitlines()[:1]
    return RankFailedError(
        f"{message} did not pass: {peer} is gone or too late ({first[0] if first else type(error).__name__})",
        fix="look for the first error among the ranks; all of them have to be started anew, as torchrun does",
    )
