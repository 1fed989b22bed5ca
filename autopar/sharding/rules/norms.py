"""Normalizations: leading dims, groups, channels, space. Gradients of weights are partial sums of what is averaged."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.sharding.layout import REPLICATE
from autopar.sharding.op_call import OpCall, TensorSpec
from autopar.sharding.rule import Rule
from autopar.sharding.rules.placing import SUM, RuleTable, long_dims, place, required_tensor_at, result, tensor_at

MOMENTS = "moments"  # normalized dims are sharded: their sums are all-reduced
GROUPS = "groups"  # N, C and the number of groups among the arguments are this rank's


def _leading_dims(call: OpCall, tensor: int, normalized: int) -> Iterator[int]:
    shape = required_tensor_at(call, tensor).shape
    rank = len(shape) - len(call.args[normalized])
    return (dim for dim in range(rank) if shape[dim] > 1)


def _normalized_dims(call: OpCall, tensor: int, normalized: int) -> Iterator[tuple[int, int]]:
    """(dim of the input, dim of the weight)."""
    shape, sizes = required_tensor_at(call, tensor).shape, call.args[normalized]
    return ((len(shape) - len(sizes) + dim, dim) for dim, size in enumerate(sizes) if size > 1)


def layer_norm(call: OpCall) -> Iterator[Rule]:
    """(input, normalized_shape, weight, bias, eps) -> (out, mean, rstd)."""
    for dim in _leading_dims(call, 0, 1):
        yield place(call, {0: Shard(dim)}, Shard(dim))
    for dim, own in _normalized_dims(call, 0, 1):
        placed = {0: Shard(dim), 2: Shard(own), 3: Shard(own)}
        outputs = (Shard(dim), REPLICATE, REPLICATE)
        yield place(call, placed, outputs, form=MOMENTS, internal_bytes=2 * result(call, 1).nbytes)


def rms_norm(call: OpCall) -> Iterator[Rule]:
    """`_fused_rms_norm(input, normalized_shape, weight, eps)` -> (out, rstd)."""
    for dim in _leading_dims(call, 0, 1):
        yield place(call, {0: Shard(dim)}, Shard(dim))
    if call.args[3] is not None:
        for dim, own in _normalized_dims(call, 0, 1):
            placed, outputs = {0: Shard(dim), 2: Shard(own)}, (Shard(dim), REPLICATE)
            yield place(call, placed, outputs, form=MOMENTS, internal_bytes=result(call, 1).nbytes)


def layer_norm_backward(call: OpCall) -> Iterator[Rule]:
    """(grad_out, input, normalized_shape, mean, rstd, weight, bias, mask) -> gradients of input, weight, bias."""
    for dim in _leading_dims(call, 1, 2):
        yield place(call, {index: Shard(dim) for index in (0, 1, 3, 4)}, (Shard(dim), SUM, SUM))
    for dim, own in _normalized_dims(call, 1, 2):
        placed = {0: Shard(dim), 1: Shard(dim), 5: Shard(own), 6: Shard(own)}
        row_bytes = required_tensor_at(call, 4).nbytes
        yield place(call, placed, (Shard(dim), Shard(own), Shard(own)), form=MOMENTS, internal_bytes=2 * row_bytes)


def rms_norm_backward(call: OpCall) -> Iterator[Rule]:
    """(grad_out, input, normalized_shape, rstd, weight, mask) -> gradients of input, weight."""
    for dim in _leading_dims(call, 1, 2):
        yield place(call, {index: Shard(dim) for index in (0, 1, 3)}, (Shard(dim), SUM))
    for dim, own in _normalized_dims(call, 1, 2):
        placed = {0: Shard(dim), 1: Shard(dim), 4: Shard(own)}
        row_bytes = required_tensor_at(call, 3).nbytes
        yield place(call, placed, (Shard(dim), Shard(own)), form=MOMENTS, internal_bytes=row_bytes)


def _spatial_dims(call: OpCall, tensor: int) -> Iterator[int]:
    """The dims behind batch and channels."""
    return (dim for dim in long_dims(required_tensor_at(call, tensor)) if dim > 1)


def group_norm(call: OpCall) -> Iterator[Rule]:
    """(input, weight, bias, N, C, HxW, group, eps) -> (out, mean, rstd)."""
    yield place(call, {0: Shard(0)}, Shard(0), form=GROUPS)
    channels = {0: Shard(1), 1: Shard(0), 2: Shard(0)}
    yield place(call, channels, Shard(1), form=GROUPS, even=True, splits=call.args[6])
    for dim in _spatial_dims(call, 0):
        outputs: tuple[Placement, ...] = (Shard(dim), REPLICATE, REPLICATE)
        yield place(call, {0: Shard(dim)}, outputs, form=MOMENTS, internal_bytes=2 * result(call, 1).nbytes)


def group_norm_backward(call: OpCall) -> Iterator[Rule]:
    """(grad_out, input, mean, rstd, weight, N, C, HxW, group, mask) -> gradients of input, weight, bias."""
    yield place(call, {index: Shard(0) for index in range(4)}, (Shard(0), SUM, SUM), form=GROUPS)
    channels = {**{index: Shard(1) for index in range(4)}, 4: Shard(0)}
    outputs: tuple[Placement, ...] = (Shard(1), Shard(0), Shard(0))
    yield place(call, channels, outputs, form=GROUPS, even=True, splits=call.args[8])
    for dim in _spatial_dims(call, 1):
        placed, outputs = {0: Shard(dim), 1: Shard(dim)}, (Shard(dim), SUM, SUM)
        group_bytes = required_tensor_at(call, 2).nbytes
        yield place(call, placed, outputs, form=MOMENTS, internal_bytes=2 * group_bytes)


def _channel_shard(spec: TensorSpec | None) -> Placement:
    """Per-channel values are cut; in eval mode there are none."""
    return REPLICATE if spec is None or not spec.numel else Shard(0)


def _dims_but_channels(call: OpCall, tensor: int) -> Iterator[int]:
    return (dim for dim in long_dims(required_tensor_at(call, tensor)) if dim != 1)


def batch_norm(call: OpCall) -> Iterator[Rule]:
    """(input, weight, bias, running_mean, running_var, training, ...): channels, and all other dims in eval mode."""
    statistics = tuple(map(_channel_shard, call.outputs[1:]))
    yield place(call, {0: Shard(1), **{index: Shard(0) for index in (1, 2, 3, 4)}}, (Shard(1), *statistics))
    if not call.args[5] and tensor_at(call, 3) is not None:
        for dim in _dims_but_channels(call, 0):
            yield place(call, {0: Shard(dim)}, (Shard(dim), *(REPLICATE for _ in statistics)))


def batch_norm_without_statistics(call: OpCall) -> Iterator[Rule]:
    """(input, weight, bias, training, momentum, eps): channels."""
    yield place(call, {0: Shard(1), 1: Shard(0), 2: Shard(0)}, (Shard(1), *map(_channel_shard, call.outputs[1:])))


def batch_norm_with_fixed_statistics(call: OpCall) -> Iterator[Rule]:
    """(input, weight, bias, running_mean, running_var, momentum, eps): every dim."""
    statistics = tuple(map(_channel_shard, call.outputs[1:]))
    yield place(call, {0: Shard(1), **{index: Shard(0) for index in (1, 2, 3, 4)}}, (Shard(1), *statistics))
    for dim in _dims_but_channels(call, 0):
        yield place(call, {0: Shard(dim)}, (Shard(dim), *(REPLICATE for _ in statistics)))


def batch_norm_backward(call: OpCall) -> Iterator[Rule]:
    """(grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, mask)."""
    channels = {0: Shard(1), 1: Shard(1), **{index: Shard(0) for index in range(2, 7)}}
    yield place(call, channels, (Shard(1), Shard(0), Shard(0)))
    if not call.args[7] and tensor_at(call, 3) is not None:
        for dim in _dims_but_channels(call, 1):
            yield place(call, {0: Shard(dim), 1: Shard(dim)}, (Shard(dim), SUM, SUM))


RULES: RuleTable = {
    "aten.native_layer_norm.default": layer_norm,
    "aten.native_layer_norm_backward.default": layer_norm_backward,
    "aten._fused_rms_norm.default": rms_norm,
    "aten._fused_rms_norm_backward.default": rms_norm_backward,
    "aten.native_group_norm.default": group_norm,
    "aten.native_group_norm_backward.default": group_norm_backward,
    "aten.native_batch_norm.default": batch_norm,
    "aten._native_batch_norm_legit.default": batch_norm,
    "aten._native_batch_norm_legit.no_stats": batch_norm_without_statistics,
    "aten._native_batch_norm_legit_no_training.default": batch_norm_with_fixed_statistics,
    "aten._native_batch_norm_legit_functional.default": batch_norm,
    "aten.native_batch_norm_backward.default": batch_norm_backward,
}
