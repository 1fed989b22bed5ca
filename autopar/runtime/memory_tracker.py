"""Measured memory: the bytes of all storages that tensor ops touched and that are still alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.torch_compat import DispatchMode


class MemoryTracker(DispatchMode):
    """Counts live bytes by storage, while it is entered.

    Each storage counts once, whichever tensors view it, from the op that first returns it (or from `hold`) until it is
    freed. Memory inside kernels is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._alive: set[int] = set()  # identities of storages

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Count tensors that were made outside."""
        for tensor in tensors:
            self._count(tensor)

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._alive:
            return
        self._alive.add(storage._cdata)
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())

    def _release(self, identity: int, bytes_: int) -> None:
        self._alive.discard(identity)
        self.live_bytes -= bytes_


class LockstepMemory:
    """An observer of `run_lockstep`: one tracker per rank, entered while that rank computes."""

    def __init__(self, ranks: int) -> None:
        self.trackers = [MemoryTracker() for _ in range(ranks)]

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Each rank's peak."""
        return tuple(tracker.peak_bytes for tracker in self.trackers)

    def on_rank(self, rank: int) -> AbstractContextManager[object]:
        return self._tracking(rank)

    @contextmanager
    def _tracking(self, rank: int) -> Iterator[None]:
        with self.trackers[rank]:
            yield

    def on_value(self, rank: int, node: fx.Node, value: Any) -> None:
        if node.op == "placeholder":
            self.trackers[rank].hold([value])
