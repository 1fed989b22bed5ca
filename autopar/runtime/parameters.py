"""Parameters as DTensors: made from full values, laid out anew in place, and read back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from autopar.sharding.dtensors import as_dtensor, detached, layout_of, on_device, redistributed
from autopar.sharding.layout import REPLICATE, Layout, local_chunk, replicated
from autopar.torch_compat import set_dtensor_content


def flat_layout(shape: Sequence[int], axes: int) -> Layout:
    """Dim 0 over the whole mesh: how parameters lie before there is a plan."""
    return (Shard(0),) * axes if shape else replicated(axes)


def local_part(full: Tensor, mesh: DeviceMesh, layout: Layout) -> Tensor:
    """This rank's shard of a full tensor, as a view of it."""
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    offsets, lengths = local_chunk(tuple(full.shape), layout, tuple(mesh.shape), coordinates)
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        full = full.narrow(dim, offset, length)
    return full


def distributed_parameter(full: Tensor, mesh: DeviceMesh, layout: Layout) -> nn.Parameter:
    """A parameter with the values that the mesh's first rank holds; only its shards are kept."""
    value = full.detach().to(mesh.device_type).contiguous()
    if mesh.size() == 1:
        held = as_dtensor(value.clone(), mesh, layout, value.shape)
    else:
        held = distribute_tensor(value, mesh, layout, src_data_rank=0)
        held = as_dtensor(owned(held.to_local(), value), mesh, layout, value.shape)
    return nn.Parameter(held, requires_grad=full.requires_grad)


def owned(local: Tensor, source: Tensor) -> Tensor:
    """`local`, contiguous and in a storage of its own: neither `source`'s nor a larger one."""
    alone = local.untyped_storage().nbytes() == local.nbytes
    if alone and local.is_contiguous() and local.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
        return local.detach()
    return local.detach().clone(memory_format=torch.contiguous_format)


def replicated_buffer(full: Tensor, mesh: DeviceMesh) -> Tensor:
    """A copy of a buffer with the values that the mesh's first rank holds."""
    value = full.detach().to(mesh.device_type).clone(memory_format=torch.contiguous_format)
    for axis, ranks in enumerate(mesh.shape):
        if ranks > 1:
            dist.broadcast(value, group=mesh.get_group(axis), group_src=0)
    return value


def lay_out_anew(tensor: DTensor, layout: Layout) -> None:
    """Move the value of a DTensor to another layout; the object stays the same one.

    Hooks, the optimizer's references and the autograd node that accumulates its gradient all stay attached, which
    `torch.utils.swap_tensors` would give away together with the old content.
    """
    if layout_of(tensor) == layout:
        return
    with torch.no_grad():
        moved = redistributed(tensor, layout)
        local = owned(moved.to_local(), tensor.to_local())
        set_dtensor_content(tensor, as_dtensor(local, tensor.device_mesh, layout, tensor.shape))


def lay_out_parameter(parameter: DTensor, layout: Layout) -> None:
    """`lay_out_anew` for a parameter and the gradient that it holds."""
    lay_out_anew(parameter, layout)
    if isinstance(parameter.grad, DTensor):
        lay_out_anew(parameter.grad, layout)


def lay_out_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every state tensor that has its parameter's shape the parameter's layout, in place.

    One that lies on the host is left to its optimizer, which lays it out once it is on the device.
    """
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if not isinstance(value, DTensor) or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
                continue
            if value.to_local().device.type == value.device_mesh.device_type:
                lay_out_anew(value, layout_of(parameter))


def in_layout(value: Tensor, mesh: DeviceMesh, layout: Layout) -> Tensor:
    """This rank's shard of a value that is a DTensor, or that every rank holds in full. No gradients flow."""
    with torch.no_grad():
        if not isinstance(value, DTensor):
            return local_part(value.detach(), mesh, layout).to(mesh.device_type).contiguous()
        if value.device_mesh != mesh:
            return in_layout(value.full_tensor(), mesh, layout)
        return on_device(detached(value)).redistribute(mesh, layout).to_local().contiguous()


def full_value(local: Tensor, mesh: DeviceMesh, layout: Layout, shape: Sequence[int]) -> Tensor:
    """The full tensor of which this rank holds `local`, on every rank."""
    if all(placement == REPLICATE for placement in layout):
        return local
    return as_dtensor(local, mesh, layout, shape).redistribute(mesh, replicated(mesh.ndim)).to_local()
