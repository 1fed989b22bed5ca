"""Pooling, interpolation and patches: every dim but the spatial ones may be sharded, and those too where the op slides
a window over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.distributed.tensor import Shard

from autopar.sharding.op_call import OpCall, TensorSpec
from autopar.sharding.rule import Rule
from autopar.sharding.rules.placing import SUM, RuleTable, place, required_tensor_at, result, summable
from autopar.sharding.rules.spatial import Windows, everywhere, padded, pooled, pooled_evenly, resampled

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


def source_and_result(call: OpCall) -> tuple[TensorSpec, TensorSpec]:
    """What an op slides over, and what it makes; of a backward, those of its forward."""
    first, last = call.inputs[0], result(call)
    return (last, first) if is_backward(call) else (first, last)


def is_backward(call: OpCall) -> bool:
    return "_backward" in call.name


def max_pool(call: OpCall, spatial: int) -> Windows:
    """(self, kernel, stride, padding, dilation, ceil_mode); a backward has its gradient in front."""
    at = 1 + is_backward(call)
    numbers = (("kernel_size", ()), ("stride", ()), ("padding", 0), ("dilation", 1), ("ceil_mode", False))
    arguments = [call.argument(at + index, *given) for index, given in enumerate(numbers)]
    return pooled(*source_and_result(call), spatial, arguments)


def average_pool(call: OpCall, spatial: int) -> Windows:
    """(self, kernel, stride, padding, ceil_mode, ...); a backward has its gradient in front."""
    at = 1 + is_backward(call)
    numbers = (("kernel_size", ()), ("stride", ()), ("padding", 0), ("ceil_mode", False))
    kernel, stride, padding, ceil_mode = (call.argument(at + index, *given) for index, given in enumerate(numbers))
    return pooled(*source_and_result(call), spatial, (kernel, stride, padding, 1, ceil_mode))


def adaptive_pool(call: OpCall, spatial: int) -> Windows:
    return pooled_evenly(*source_and_result(call), spatial)


def interpolation(mode: str) -> Callable[[OpCall, int], Windows]:
    """(self, output_size, [align_corners,] *scales); a backward has (grad, output_size, input_size, ...)."""

    def windows(call: OpCall, spatial: int) -> Windows:
        at, aligns = 2 + is_backward(call), mode != "nearest"
        if aligns and call.argument(at, "align_corners"):
            return ()
        keywords = ("scales",) if spatial == 1 else ("scales_d", "scales_h", "scales_w")[-spatial:]
        scales = [call.argument(at + aligns + index, name) for index, name in enumerate(keywords)]
        return resampled(*source_and_result(call), spatial, mode, scales)

    return windows


def padding(mode: str) -> Callable[[OpCall, int], Windows]:
    """(self, padding); a backward has its gradient in front."""

    def windows(call: OpCall, spatial: int) -> Windows:
        return padded(*source_and_result(call), call.args[1 + is_backward(call)], mode=mode)

    return windows


# families of ops that slide windows, by how their names begin
SLIDING: tuple[tuple[str, Callable[[OpCall, int], Windows]], ...] = (
    ("max_pool", max_pool),
    ("avg_pool", average_pool),
    ("_adaptive_avg_pool", adaptive_pool),
    ("adaptive_max_pool", adaptive_pool),
    ("upsample_nearest", interpolation("nearest")),
    ("_upsample_nearest", interpolation("nearest")),
    ("upsample_linear", interpolation("linear")),
    ("upsample_bilinear", interpolation("linear")),
    ("upsample_trilinear", interpolation("linear")),
    ("upsample_bicubic", interpolation("cubic")),
    ("reflection_pad", padding("reflection")),
    ("replication_pad", padding("replication")),
)


def image_rules(name: str, spatial: int) -> Callable[[OpCall], Iterator[Rule]]:
    """Rules of one op of `SPATIAL`."""
    outer = outside(spatial, is_linear=name in LINEAR)
    windows = next((family for start, family in SLIDING if name.startswith(start)), None)

    def rules(call: OpCall) -> Iterator[Rule]:
        yield from outer(call)
        if windows is not None:
            yield from everywhere(call, source_and_result(call)[0], windows(call, spatial))

    return rules


def shuffled(call: OpCall) -> Iterator[Rule]:
    """`pixel_shuffle`, `pixel_unshuffle`: a row becomes whole rows, or whole rows one."""
    yield from outside(3, is_linear=True)(call)
    rank = len(result(call).shape)
    for dim in (rank - 2, rank - 1):
        if min(result(call).shape[dim], call.inputs[0].shape[dim]) > 1:
            yield Rule((Shard(dim),), (Shard(dim),), even=True)


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
        f"aten.{name}.default": image_rules(name, spatial) for spatial, line in SPATIAL.items() for name in line.split()
    },
    "aten.pixel_shuffle.default": shuffled,
    "aten.pixel_unshuffle.default": shuffled,
    "aten.grid_sampler_2d.default": grid_sampler,
    "aten.grid_sampler_3d.default": grid_sampler,
    "aten.grid_sampler_2d_backward.default": grid_sampler_backward,
    "aten.grid_sampler_3d_backward.default": grid_sampler_backward,
    "aten.fractional_max_pool2d.default": fractional_max_pool,
    "aten.fractional_max_pool3d.default": fractional_max_pool,
    "aten.im2col.default": patches,
    "aten.col2im.default": patches,
}
