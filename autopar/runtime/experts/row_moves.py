"""Rows of a tensor in another order, each carried to the rank whose shard has its new place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.sharding.dtensors import as_dtensor, detached, layout_of
from autopar.sharding.layout import Layout, local_chunk, shard_dim


@dataclass(frozen=True)
class _Peer:
    """`rank`: in the group of those that hold the other parts of a tensor's rows. Rows from `start` up to `end`."""

    rank: int
    start: int
    end: int


@dataclass(frozen=True)
class _Part:
    """What this rank holds of a tensor of `shape`."""

    mesh: DeviceMesh
    layout: Layout
    shape: tuple[int, ...]

    @property
    def axes(self) -> tuple[int, ...]:
        """The mesh axes that cut rows."""
        return tuple(axis for axis, item in enumerate(self.layout) if shard_dim(item) == 0)

    @property
    def here(self) -> tuple[int, ...]:
        return tuple(self.mesh.get_coordinate() or ())

    @property
    def peers(self) -> list[_Peer]:
        """The ranks with the other rows of this part, this one among them, by their number in their group."""
        sizes, found = tuple(self.mesh.shape), []
        for there in product(*(range(n) if axis in self.axes else (self.here[axis],) for axis, n in enumerate(sizes))):
            starts, lengths = local_chunk(self.shape, self.layout, sizes, there)
            found.append((int(self.mesh.mesh[there]), starts[0], starts[0] + lengths[0]))
        if len(self.axes) > 1:  # a group of ranks counts them as the world does, one of an axis as the axis does
            found.sort()
        return [_Peer(number, start, end) for number, (_, start, end) in enumerate(found)]


@dataclass
class RowMover:
    """Moves rows between the ranks of a mesh. Called on all ranks alike."""

    _groups: dict[tuple[DeviceMesh, tuple[int, ...]], Any] = field(default_factory=dict)  # by axes that cut rows

    def reordered(self, value: Tensor, sources: Sequence[int]) -> tuple[Tensor, int]:
        """(a new tensor laid out like `value`, whose row r is its row sources[r]; bytes that came from other ranks)."""
        if not isinstance(value, DTensor):
            return value.detach()[torch.tensor(sources, device=value.device)], 0
        local, part = detached(value).to_local(), _Part(value.device_mesh, layout_of(value), tuple(value.shape))
        moved, received = self._moved(local, part, sources)
        return as_dtensor(moved, part.mesh, part.layout, part.shape), received

    def reorder(self, value: Tensor, sources: Sequence[int]) -> int:
        """`reordered` in place: the tensor's storage, and views of it, stay what they are."""
        moved, received = self.reordered(value, sources)
        with torch.no_grad():
            if isinstance(value, DTensor) and isinstance(moved, DTensor):
                detached(value).to_local().copy_(moved.to_local())
            else:
                value.copy_(moved)
        return received

    def _group(self, part: _Part) -> Any:
        """The group of the ranks that hold the other rows of this rank's part."""
        mesh, axes = part.mesh, part.axes
        if len(axes) == 1:
            return mesh.get_group(axes[0])
        if (mesh, axes) not in self._groups:
            block = tuple(slice(None) if axis in axes else place for axis, place in enumerate(part.here))
            ranks = sorted(int(rank) for rank in mesh.mesh[block].flatten())
            self._groups[mesh, axes] = dist.new_group(ranks, use_local_synchronization=True)
        return self._groups[mesh, axes]

    def _moved(self, local: Tensor, part: _Part, sources: Sequence[int]) -> tuple[Tensor, int]:
        """This rank's rows in the new order, and the bytes of those that came from others."""
        if not part.axes:
            return local[_index(sources, local)], 0
        peers, group = part.peers, self._group(part)
        own = peers[dist.get_rank(group)]
        rows = local.contiguous().flatten(1).view(torch.uint8) if local.numel() else local.new_empty((len(local), 0))
        wanted = [[row for row in range(own.start, own.end) if _holds(peer, sources[row])] for peer in peers]
        given = [
            [sources[row] - own.start for row in range(peer.start, peer.end) if _holds(own, sources[row])]
            for peer in peers
        ]
        sent = rows[_index([row for rows_of in given for row in rows_of], local)]
        coming = sum(map(len, wanted))
        received = sent.new_empty((coming, sent.shape[1]))
        dist.all_to_all_single(received, sent, list(map(len, wanted)), list(map(len, given)), group=group)
        moved = torch.empty_like(received)
        moved[_index([row - own.start for rows_of in wanted for row in rows_of], local)] = received
        row_bytes = local[:1].nbytes
        return moved.view(local.dtype).view(local.shape), row_bytes * (coming - len(wanted[own.rank]))


def _holds(peer: _Peer, row: int) -> bool:
    return peer.start <= row < peer.end


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(list(rows), dtype=torch.int64, device=like.device)
