"""DTensors whose shards lie on the mesh's devices or on the host, and their moves, which run on the devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.sharding.layout import Layout
from autopar.torch_compat import dtensor_of, swap_content


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides that DTensors of autopar report, whatever the original's were."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def as_dtensor(local: Tensor, mesh: DeviceMesh, layout: Layout, shape: Sequence[int]) -> DTensor:
    """The DTensor of `shape` of which this rank holds `local`, where that lies."""
    return dtensor_of(local.detach(), mesh, layout, torch.Size(shape), contiguous_stride(shape))


def layout_of(tensor: DTensor) -> Layout:
    """Its placements."""
    return tuple(tensor.placements)


def detached(tensor: DTensor) -> DTensor:
    """The same values, without their history."""
    return cast(DTensor, tensor.detach())


def on_device(tensor: DTensor) -> DTensor:
    """A DTensor whose shard is on the mesh's device, where collectives take it; itself if it is there."""
    local = detached(tensor).to_local()
    if local.device.type == tensor.device_mesh.device_type:
        return tensor
    return as_dtensor(local.to(tensor.device_mesh.device_type), tensor.device_mesh, layout_of(tensor), tensor.shape)


def redistributed(tensor: DTensor, layout: Layout) -> DTensor:
    """The same values in another layout, on the device or the host as they were. No gradients flow."""
    if layout_of(tensor) == layout:
        return detached(tensor)
    with torch.no_grad():
        moved = on_device(detached(tensor)).redistribute(tensor.device_mesh, layout)
        local = moved.to_local().to(tensor.to_local().device)
        return as_dtensor(local, tensor.device_mesh, layout, tensor.shape)


def host_copy(local: Tensor) -> Tensor:
    """A copy of a shard on the host, in pinned memory where it comes from a GPU."""
    if local.device.type == "cpu":
        return local
    return torch.empty_like(local, device="cpu", pin_memory=local.device.type == "cuda").copy_(local)


def to_host(parameter: DTensor) -> None:
    """Let a parameter's shard lie on the host, and the gradient that it holds; the object and its hooks stay, what else
    has noted its autograd node does not."""
    _put(parameter, "cpu")


def to_device(parameter: DTensor) -> None:
    """Let a parameter's shard lie on the mesh's device, and the gradient that it holds; see `to_host`."""
    _put(parameter, parameter.device_mesh.device_type)


def _put(parameter: DTensor, target: str) -> None:
    local, held = detached(parameter).to_local(), parameter.grad
    if local.device.type == target:
        return
    move = host_copy if target == "cpu" else partial(Tensor.to, device=target)
    there = [
        as_dtensor(move(it), parameter.device_mesh, layout_of(own), own.shape)
        for own, it in [(parameter, local), *([(held, held.to_local())] if isinstance(held, DTensor) else [])]
    ]
    parameter.grad = None
    swap_content(parameter, there[0])
    parameter.grad = there[1] if len(there) > 1 else None
