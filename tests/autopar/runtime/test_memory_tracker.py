"""Measured memory: live storages, and what a process group holds for longer than the program."""

from __future__ import annotations

import torch
import torch.distributed as dist

from autopar.runtime.memory_tracker import MemoryTracker
from tests.gloo import run_on_ranks

SIZE = 64  # elements of float32
_c10d = torch.ops._c10d_functional


def test_a_storage_counts_once_while_any_view_lives() -> None:
    with MemoryTracker() as tracker:
        x = torch.zeros(SIZE)
        view = x.view(8, 8)
        del x
        assert tracker.live_bytes == 4 * SIZE
        y = view + 1
        del view
        assert tracker.live_bytes == 4 * SIZE
        del y
    assert (tracker.live_bytes, tracker.peak_bytes) == (0, 8 * SIZE)


def gather_and_drop(times: int) -> int:
    """On each rank: gather, wait, let go of all, then make as much anew; the peak in bytes."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    assert group is not None
    with torch.no_grad(), MemoryTracker() as tracker:
        for _ in range(times):
            x = torch.zeros(SIZE)
            gathered = _c10d.all_gather_into_tensor.default(x, ranks, group.group_name)
            del x
            gathered = _c10d.wait_tensor.default(gathered)
            del gathered
            y = torch.zeros(SIZE * (1 + ranks))
            del y
    return tracker.peak_bytes


def test_what_a_thread_of_gloo_still_holds_is_not_counted() -> None:
    """Its thread waits for the interpreter's lock to let go of what it sent, which a tracker in haste counts."""
    assert run_on_ranks(gather_and_drop, 2, 100) == [4 * SIZE * 3] * 2
