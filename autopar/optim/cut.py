"""How a parameter is cut over a mesh, and how what each rank computes of its shard becomes that of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.errors import UnsupportedOptionError
from autopar.sharding.dtensors import as_dtensor, redistributed
from autopar.sharding.layout import REPLICATE, Layout, local_chunk, shard_dim


@dataclass(frozen=True)
class Cut:
    """The layout of a parameter of `shape`. `mesh` None: a plain tensor, on one device or the same on all."""

    shape: tuple[int, ...]
    mesh: DeviceMesh | None = None
    layout: Layout = ()

    def axes_cutting(self, dims: Iterable[int]) -> tuple[int, ...]:
        """The mesh axes over which a sum or maximum over `dims` of the whole has to go."""
        wanted = set(dims)
        return tuple(axis for axis, placement in enumerate(self.layout) if shard_dim(placement) in wanted)

    def kept(self, dims: Sequence[int], shape: Sequence[int]) -> Cut:
        """The cut of a statistic of `shape` whose dims are the parameter's where they are among `dims`, else 1 long."""
        layout = tuple(item if shard_dim(item) in dims else REPLICATE for item in self.layout)
        return Cut(tuple(shape), self.mesh, layout)

    def offsets_of(self, coordinates: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offsets, lengths) per dim of the shard at these coordinates of the mesh."""
        if self.mesh is None:
            return (0,) * len(self.shape), self.shape
        return local_chunk(self.shape, self.layout, tuple(self.mesh.shape), coordinates)

    @property
    def own(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offsets, lengths) per dim of this rank's shard."""
        coordinates = self.mesh.get_coordinate() if self.mesh is not None else ()
        assert coordinates is not None
        return self.offsets_of(coordinates)

    def zeros(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A new state tensor cut so: a DTensor if the parameter is one."""
        return self.whole(torch.zeros(self.own[1], dtype=dtype or like.dtype, device=like.device))

    def whole(self, local: Tensor) -> Tensor:
        """The tensor of which this rank holds `local`."""
        if self.mesh is None:
            return local
        return as_dtensor(local, self.mesh, self.layout, self.shape)

    def part(self, value: Tensor) -> Tensor:
        """This rank's shard of a value that lies in any layout, or that every rank holds in full."""
        if self.mesh is None:
            return value.full_tensor() if isinstance(value, DTensor) else value
        if isinstance(value, DTensor):
            return redistributed(value, self.layout).to_local()
        offsets, lengths = self.own
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            value = value.narrow(dim, offset, length)
        return value.contiguous()


def cut_of(parameter: Tensor) -> Cut:
    """The cut of a parameter. Raises UnsupportedOptionError for placements in which no parameter is stored."""
    if not isinstance(parameter, DTensor):
        return Cut(tuple(parameter.shape))
    layout: Layout = tuple(parameter.placements)
    if any(type(placement) not in (Shard, Replicate) for placement in layout):
        raise UnsupportedOptionError(
            f"a parameter of shape {tuple(parameter.shape)} lies in {layout}: its shards are no blocks of it in order",
            fix="lay it out with Shard and Replicate placements, as autopar.compile does",
        )
    return Cut(tuple(parameter.shape), parameter.device_mesh, layout)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's shard; writes into it reach the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient_of(parameter: Tensor, cut: Cut) -> Tensor:
    """This rank's shard of a parameter's gradient, wherever the gradient lies."""
    gradient = cast(Tensor, parameter.grad)
    if gradient.is_sparse or gradient.is_complex():
        raise UnsupportedOptionError(
            "the gradient is sparse or complex, which this optimizer is not defined for",
            fix="use dense real parameters, or an optimizer of torch.optim that takes them",
        )
    return cut.part(gradient.detach())


def state_part(state: dict[str, Any], name: str, cut: Cut) -> Tensor:
    """This rank's shard of a state tensor, which is first brought to its layout (after loading, it may lie in any)."""
    value: Tensor = state[name]
    if not isinstance(value, DTensor) and cut.mesh is None:
        return value
    if not isinstance(value, DTensor) or tuple(value.placements) != cut.layout or value.device_mesh != cut.mesh:
        state[name] = value = cut.whole(cut.part(value))
    return local_of(value)


@dataclass(frozen=True)
class Statistic:
    """A contiguous tensor of local sums or maxima, and the mesh axes over which they become those of the whole."""

    value: Tensor
    cut: Cut
    axes: tuple[int, ...]


def reduce_in_place(statistics: Sequence[Statistic], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """All-reduce every statistic over its axes: one collective per mesh axis and dtype, however many there are.

    Each rank gives the statistics of the same parameters in the same order.
    """
    together: dict[tuple[DeviceMesh, int, torch.dtype, torch.device], list[Tensor]] = {}
    for item in statistics:
        for axis in item.axes:
            assert item.cut.mesh is not None
            if item.cut.mesh.size(axis) > 1:
                key = item.cut.mesh, axis, item.value.dtype, item.value.device
                together.setdefault(key, []).append(item.value)
    for mesh, axis, dtype, device in sorted(together, key=lambda key: (key[1], str(key[2]), str(key[3]))):
        values = together[mesh, axis, dtype, device]
        flat = torch.cat([value.reshape(-1) for value in values])
        flat = flat.to(mesh.device_type)  # of what lies on the host
        dist.all_reduce(flat, op, group=mesh.get_group(axis))
        start = 0
        for value in values:
            value.copy_(flat.narrow(0, start, value.numel()).view(value.shape))
            start += value.numel()
