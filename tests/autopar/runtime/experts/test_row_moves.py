"""Rows in another order, for tensors cut along rows, columns, both, over one axis and over two, unevenly too."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.runtime.experts.row_moves import RowMover
from autopar.runtime.parameters import as_dtensor, local_part
from tests.gloo import run_on_ranks

ROWS = 7
ORDER = [3, 1, 0, 6, 5, 4, 2]
LAYOUTS = [
    (Shard(0), Shard(0)),
    (Replicate(), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Replicate()),
]


def reorder() -> list[tuple[bool, bool, int]]:
    mesh, mover, found = init_device_mesh("cpu", (2, 2)), RowMover(), []
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        full = torch.arange(ROWS * 4).view(ROWS, 4).to(dtype)
        for layout in LAYOUTS:
            local = local_part(full, mesh, layout).clone()
            value = as_dtensor(local, mesh, layout, full.shape)
            moved, received = mover.reordered(value, ORDER)
            same_storage = mover.reorder(value, ORDER) == received and torch.equal(value.to_local(), local)
            assert isinstance(moved, DTensor)
            right = torch.equal(moved.full_tensor(), full[ORDER]) and torch.equal(value.full_tensor(), full[ORDER])
            found.append((right, same_storage, received))
    return found


def test_rows_arrive_wherever_they_are_cut_and_bytes_are_those_of_rows_from_elsewhere() -> None:
    ranks = run_on_ranks(reorder, 4)
    assert all(right and same for found in ranks for right, same, _ in found)
    # over both axes ranks hold rows 0-1, 2-3, 4-5, 6; of ORDER's rows there, those from elsewhere: 1, 2, 0, 1
    both = [found[0][2] for found in ranks]
    assert both == [16 * count for count in (1, 2, 0, 1)]
    assert all(found[3][2] == 0 for found in ranks)  # columns alone: nothing leaves a rank
