"""Measured memory: the bytes of all storages that tensor ops touched and that are still alive."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.ops import packing as _packing  # noqa: F401  (registers autopar::offload)
from autopar.passes.collectives import KIND_OF, WAIT
from autopar.torch_compat import DispatchMode, storage_use_count, use_count

OFFLOAD = torch.ops.autopar.offload.default
LET_GO_S = 0.1  # at most
OWN_USES = 2  # of a storage: by its tensor and by its own Python object


class MemoryTracker(DispatchMode):
    """Counts live bytes by storage, while it is entered.

    Each storage counts once, whichever tensors view it, from the op that first returns it (or from `hold`) until it is
    freed. Memory inside kernels is not seen. What `autopar::offload` returns lies on the host: it is counted apart.
    A thread of gloo holds what a collective read and wrote for a moment after its wait, until it gets the interpreter's
    lock; the tracker gives it that moment, so that what it counts is what the program holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.host_bytes = 0
        self.host_peak_bytes = 0
        self._alive: set[int] = set()  # identities of storages
        self._in_flight: dict[int, list[weakref.ref[Tensor]]] = {}  # by the storage of the result, what is read

    def hold(self, tensors: Sequence[Tensor], *, on_host: bool = False) -> None:
        """Count tensors that were made outside; one that is known already stays where it was counted."""
        for tensor in tensors:
            self._count(tensor, on_host=on_host)

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf, on_host=func is OFFLOAD)
        if func in KIND_OF:
            read = [weakref.ref(leaf) for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
            self._in_flight[result.untyped_storage()._cdata] = read
        elif func is WAIT:
            until_let_go(self._in_flight.pop(result.untyped_storage()._cdata, []), result)
        return result

    def _count(self, tensor: Tensor, *, on_host: bool = False) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._alive:
            return
        self._alive.add(storage._cdata)
        self._add(storage.nbytes(), on_host=on_host)
        weakref.finalize(storage, self._release, storage._cdata, storage.nbytes(), on_host=on_host)

    def _release(self, identity: int, bytes_: int, *, on_host: bool) -> None:
        self._alive.discard(identity)
        self._add(-bytes_, on_host=on_host)

    def _add(self, bytes_: int, *, on_host: bool) -> None:
        if on_host:
            self.host_bytes += bytes_
            self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
        else:
            self.live_bytes += bytes_
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def until_let_go(read: Sequence[weakref.ref[Tensor]], written: Tensor) -> None:
    """Wait until Python alone holds a collective's tensors, but not for long: something else may hold them too."""
    end = time.monotonic() + LET_GO_S
    while time.monotonic() < end:
        if not any(use_count(ref()) > 1 for ref in read) and storage_use_count(written) <= OWN_USES:
            return
        time.sleep(1e-5)  # the lock is free meanwhile


class LockstepMemory:
    """An observer of `run_lockstep`: one tracker per rank, entered while that rank computes."""

    def __init__(self, ranks: int) -> None:
        self.trackers = [MemoryTracker() for _ in range(ranks)]

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Each rank's peak."""
        return tuple(tracker.peak_bytes for tracker in self.trackers)

    @property
    def host_peak_bytes(self) -> tuple[int, ...]:
        """Each rank's most bytes on the host."""
        return tuple(tracker.host_peak_bytes for tracker in self.trackers)

    def on_rank(self, rank: int) -> AbstractContextManager[object]:
        return self._tracking(rank)

    @contextmanager
    def _tracking(self, rank: int) -> Iterator[None]:
        with self.trackers[rank]:
            yield

    def on_value(self, rank: int, node: fx.Node, value: Any) -> None:
        if node.op == "placeholder":
            self.trackers[rank].hold([value])
