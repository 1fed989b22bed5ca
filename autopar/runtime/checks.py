"""The ranks of a mesh as one party: what they must agree on, what the first of them decides, and errors shared by all.

Every function here is called on all ranks together, and raises on all ranks or on none, so that no rank is left
waiting. The messages travel over a gloo group of their own, beside the collectives of the model.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar import errors
from autopar.errors import AutoparError, MeshError, RankFailedError, RanksDisagreeError

T = TypeVar("T")
LARGEST = 2**63 - 1
Description = tuple[str, str, str, str]  # of an error: class, what, where, fix


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise MeshError unless this process is one of the ranks of a mesh that fits the world."""
    if not dist.is_initialized():
        raise MeshError(
            "there is no process group", fix="call torch.distributed.init_process_group first, or launch with torchrun"
        )
    if mesh.size() > dist.get_world_size():
        raise MeshError(
            f"the mesh has {mesh.size()} ranks, the world has {dist.get_world_size()}",
            fix=f"launch with torchrun --nproc-per-node {mesh.size()}, or plan for a smaller mesh",
        )
    if mesh.get_coordinate() is None:
        raise MeshError(f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}")


class RankGroup:
    """The ranks of a mesh. The first of them (the mesh's origin) decides; a mesh of one rank needs no messages."""

    def __init__(self, mesh: DeviceMesh) -> None:
        check_mesh(mesh)
        ranks = [int(rank) for rank in mesh.mesh.flatten()]
        self.first, self.rank, self.size = ranks[0], dist.get_rank(), len(ranks)
        self._ranks = sorted(ranks)
        self._group: Any = None
        if self.size > 1:
            self._group = dist.new_group(self._ranks, backend="gloo", use_local_synchronization=True)

    @property
    def is_first(self) -> bool:
        return self.rank == self.first

    def check_call(self, key: str) -> int:
        """Compare the key of a call over all ranks; the first rank's random seed.

        One all-reduce of three integers over gloo per call: tens of microseconds within a node. It is what turns
        ranks that were called with different shapes into an error on each of them, where a cached plan on one rank
        and a new one on another would otherwise wait for each other for ever.
        """
        seed = torch.initial_seed() & LARGEST
        if self.size == 1:
            return seed
        digest = int(_digest(key), 16)
        votes = torch.tensor([digest, -digest, seed if self.is_first else LARGEST], device="cpu")
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=self._group)
        lowest, highest, seed = votes.tolist()
        if lowest != -highest:
            self.agree("the call", key)
        return int(seed)

    def agree(self, subject: str, text: str) -> None:
        """Raise RanksDisagreeError on every rank unless `text` is the same on all of them."""
        if self.size == 1:
            return
        digests = self._gather(_digest(text))
        if len(set(digests)) == 1:
            return
        texts = self._gather(text)
        raise RanksDisagreeError(
            _differences(subject, dict(zip(self._ranks, texts, strict=True))),
            fix="call every rank with the same shapes, modes and options; each rank is given the whole batch",
        )

    def first_decides(self, make: Callable[[], str]) -> str:
        """What `make` returns on the first rank, on every rank; its error too."""
        if self.size == 1:
            return make()
        text, error = _attempt(make) if self.is_first else (None, None)
        message: list[Any] = [(text, _described(error))]
        dist.broadcast_object_list(message, src=self.first, group=self._group)
        if error is not None:
            raise error
        text, failure = message[0]
        if failure is not None:
            raise _rebuilt(failure, self.first)
        assert isinstance(text, str)
        return text

    def all_succeed(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; if it fails on any, raise there its error and elsewhere a RankFailedError.

        Requires: `action` uses no collective, or fails on every rank alike.
        """
        if self.size == 1:
            return action()
        result, error = _attempt(action)
        failures = self._gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, failure in zip(self._ranks, failures, strict=True):
            if failure is not None:
                raise RankFailedError(f"rank {rank} failed with {failure}")
        return cast(T, result)

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in the order of their numbers, on every rank."""
        return [value] if self.size == 1 else self._gather(value)

    def _gather(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered


def _digest(text: str) -> str:
    """60 bits, as hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()[:15]


def _attempt(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:  # nothing is hidden: the caller raises it here, once it has told the other ranks
        return None, error


def _described(error: Exception | None) -> Description | None:
    """What is needed to raise the same error on another rank."""
    if error is None:
        return None
    if isinstance(error, AutoparError):
        return type(error).__name__, error.what, error.where, error.fix
    return type(error).__name__, str(error), "", ""


def _rebuilt(failure: Description, rank: int) -> AutoparError:
    name, what, where, fix = failure
    kind = getattr(errors, name, None)
    if kind is None:
        return RankFailedError(f"rank {rank} failed with {name}: {what}")
    error: AutoparError = kind.__new__(kind)
    AutoparError.__init__(error, what, where=where, fix=fix)
    return error


def _differences(subject: str, texts: dict[int, str]) -> str:
    """The lines in which the ranks' texts differ, with the ranks that have each."""
    lines = {rank: text.splitlines() for rank, text in texts.items()}
    common = set.intersection(*(set(own) for own in lines.values()))
    having: dict[str, list[int]] = defaultdict(list)
    for rank, own in lines.items():
        having[" | ".join(line for line in own if line not in common) or "nothing more"].append(rank)
    parts = [f"  ranks {', '.join(map(str, ranks))}: {what[:400]}" for what, ranks in having.items()]
    return "\n".join([f"ranks disagree on {subject}", *parts])
