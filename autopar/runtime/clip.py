"""Gradient clipping over shards: the same norm on every rank, and the one that a single device would compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autopar.runtime.execution import reduce_gradients
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.pipeline.module import PipelineModule


def clip_grad_norm_(pmodel: ParallelModule, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`; returns the norm before, a plain tensor.

    As `torch.nn.utils.clip_grad_norm_`: each element counts once, however its gradient is sharded or replicated and
    under however many names its parameter goes. Call it on every rank. Gradients left unsummed by `no_sync` are summed.

    >>> import autopar, torch
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    >>> pmodel = autopar.compile(torch.nn.Linear(1, 1, bias=False), mesh)
    >>> pmodel(torch.tensor([[3.0]])).sum().backward()
    >>> autopar.clip_grad_norm_(pmodel, 1.0).item()
    3.0
    >>> dist.destroy_process_group()
    """
    parameters = {name: parameter for name, parameter in pmodel.named_parameters() if isinstance(parameter, DTensor)}
    reduce_gradients(parameters)
    gradients = [parameter.grad for parameter in parameters.values() if isinstance(parameter.grad, DTensor)]
    if isinstance(pmodel, PipelineModule):
        total = pmodel.over_stages(_own_norm(pmodel, norm_type), norm_type)
    else:
        total = total_norm(gradients, pmodel.mesh, norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    with torch.no_grad():
        for gradient in gradients:
            local = gradient.to_local()
            local.mul_(scale.to(local.device, gradient.dtype))
    return total


def _own_norm(pmodel: PipelineModule, norm_type: float) -> Tensor:
    """The norm over this rank's stages; of a parameter that several hold, on the first of them."""
    own = pmodel.counted_parameters()
    gradients = [item.grad for name, item in pmodel.named_parameters() if name in own]
    return total_norm([item for item in gradients if isinstance(item, DTensor)], pmodel.stage_mesh, norm_type)


def total_norm(gradients: Sequence[DTensor], mesh: DeviceMesh, norm_type: float) -> Tensor:
    """The norm of all gradients together. Local norms are combined over just the axes that shard each gradient."""
    by_axes: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        axes = tuple(axis for axis, placement in enumerate(gradient.placements) if isinstance(placement, Shard))
        by_axes[axes].append(gradient.to_local())
    parts = []
    for axes, shards in sorted(by_axes.items()):
        part = _combined(_norms(shards, norm_type, mesh.device_type), norm_type)
        parts.append(_over_axes(part, mesh, axes, norm_type))
    if not parts:
        return torch.zeros((), device=mesh.device_type)
    return _combined(torch.stack(parts), norm_type)


def _norms(shards: Iterable[Tensor], norm_type: float, device: str) -> Tensor:
    """The norm of each shard, at least in float32; of an empty one 0. On the device, wherever the shards are."""
    norms = [
        torch.linalg.vector_norm(shard, norm_type, dtype=torch.promote_types(shard.dtype, torch.float32))
        if shard.numel()
        else torch.zeros((), dtype=torch.promote_types(shard.dtype, torch.float32), device=shard.device)
        for shard in shards
    ]
    widest = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    return torch.stack([norm.to(device, widest) for norm in norms])


def _combined(norms: Tensor, norm_type: float) -> Tensor:
    combined: Tensor = torch.linalg.vector_norm(norms, norm_type)
    return combined


def _over_axes(part: Tensor, mesh: DeviceMesh, axes: Sequence[int], norm_type: float) -> Tensor:
    """The norm of what the ranks along `axes` hold together, from each one's own."""
    axes = [axis for axis in axes if mesh.size(axis) > 1]
    if not axes:
        return part
    greatest = norm_type == float("inf")
    value = part.clone() if greatest else part**norm_type
    for axis in axes:
        dist.all_reduce(value, dist.ReduceOp.MAX if greatest else dist.ReduceOp.SUM, group=mesh.get_group(axis))
    return value if greatest else value ** (1.0 / norm_type)
