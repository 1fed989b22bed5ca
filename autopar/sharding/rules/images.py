"""Pooling, interpolation and patches: every dim but the spatial ones may be sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.distributed.tensor import Shard

from autopar.sharding.op_call import OpCall
from autopar.sharding.rule import Rule
from autopar.sharding.rules.placing import SUM, RuleTable, place, required_tensor_at, result, summable

# ops by the number of their spatial dims; those in LINEAR also let partial sums through in argument 0
SPATIAL: dict[int, str] = {
    1: """_upsample_nearest_exact1d _upsample_nearest_exact1d_backward upsample_nearest1d
        upsample_linear1d upsample_nearest1d_backward upsample_linear1d_backward reflection_pad1d
        reflection_pad1d_backward replication_pad1d replication_pad1d_backward""",
    2: """max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward
        _adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d adaptive_max_pool2d_backward
        upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d upsample_bilinear2d_backward
        upsample_bicubic2d upsample_bicubic2d_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
        _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward _upsample_nearest_exact2d
        _upsample_nearest_exact2d_backward reflection_pad2d reflection_pad2d_backward replication_pad2d
        replication_pad2d_backward max_unpool2d fractional_max_pool2d_backward""",
    3: """max_pool3d_with_indices max_pool3d_with_indices_backward avg_pool3d avg_pool3d_backward
        _adaptive_avg_pool3d _adaptive_avg_pool3d_backward adaptive_max_pool3d adaptive_max_pool3d_backward
        _upsample_nearest_exact3d
        _upsample_nearest_exact3d_backward upsample_nearest3d upsample_nearest3d_backward
        upsample_trilinear3d upsample_trilinear3d_backward
        reflection_pad3d reflection_pad3d_backward replication_pad3d replication_pad3d_backward max_unpool3d
        fractional_max_pool3d_backward""",
}
LINEAR = frozenset(
    name
    for line in SPATIAL.values()
    for name in line.split()
    if "backward" in name or not ("max" in name or "unpool" in name)
)


def outside(spatial: int, *, is_linear: bool) -> Callable[[OpCall], Iterator[Rule]]:
    """Rules for all dims but the last `spatial` ones, the same in every tensor."""

    def rules(call: OpCall) -> Iterator[Rule]:
        out = result(call)
        for dim in range(len(out.shape) - spatial):
            if out.shape[dim] > 1:
                yield Rule((Shard(dim),) * len(call.inputs), (Shard(dim),) * len(call.outputs))
        if is_linear and all(map(summable, call.outputs)):
            yield place(call, {0: SUM}, SUM)

    return rules


def grid_sampler(call: OpCall) -> Iterator[Rule]:
    """(input, grid, ...): batch, channels, and the dims of the grid."""
    yield place(call, {0: Shard(0), 1: Shard(0)}, Shard(0))
    yield place(call, {0: Shard(1)}, Shard(1))
    for dim in range(2, len(result(call).shape)):
        yield place(call, {1: Shard(dim - 1)}, Shard(dim))
    yield place(call, {0: SUM}, SUM)


def grid_sampler_backward(call: OpCall) -> Iterator[Rule]:
    """(grad_output, input, grid, ..., mask) -> gradients of input and grid."""
    yield place(call, {0: Shard(0), 1: Shard(0), 2: Shard(0)}, Shard(0))
    yield place(call, {0: Shard(1), 1: Shard(1)}, (Shard(1), SUM))
    for dim in range(2, len(required_tensor_at(call, 0).shape)):
        yield place(call, {0: Shard(dim), 2: Shard(dim - 1)}, (SUM, Shard(dim - 1)))
    yield place(call, {0: SUM}, SUM)


def fractional_max_pool(call: OpCall) -> Iterator[Rule]:
    """(self, kernel_size, output_size, random_samples): batch and channels, which the samples have too."""
    if len(call.inputs[0].shape) == len(call.args[1]) + 2:
        yield place(call, {0: Shard(0), 3: Shard(0)}, Shard(0))
        yield place(call, {0: Shard(1), 3: Shard(1)}, Shard(1))


def patches(call: OpCall) -> Iterator[Rule]:
    """`im2col`, `col2im`: the batch, where there is one."""
    images, columns = sorted((call.inputs[0], result(call)), key=lambda spec: -len(spec.shape))
    if len(images.shape) == 4 and len(columns.shape) == 3:
        yield place(call, {0: Shard(0)}, Shard(0))
    yield place(call, {0: SUM}, SUM)


RULES: RuleTable = {
    **{
        f"aten.{name}.default": outside(spatial, is_linear=name in LINEAR)
        for spatial, line in SPATIAL.items()
        for name in line.split()
    },
    "aten.pixel_shuffle.default": outside(3, is_linear=True),
    "aten.pixel_unshuffle.default": outside(3, is_linear=True),
    "aten.grid_sampler_2d.default": grid_sampler,
    "aten.grid_sampler_3d.default": grid_sampler,
    "aten.grid_sampler_2d_backward.default": grid_sampler_backward,
    "aten.grid_sampler_3d_backward.default": grid_sampler_backward,
    "aten.fractional_max_pool2d.default": fractional_max_pool,
    "aten.fractional_max_pool3d.default": fractional_max_pool,
    "aten.im2col.default": patches,
    "aten.col2im.default": patches,
}
