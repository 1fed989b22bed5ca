"""Spatial dims: ops that slide a window over them may shard them, and exchange halos."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.distributed.tensor import Shard

from autopar.sharding.op_call import OpCall, TensorSpec
from autopar.sharding.rule import Rule
from autopar.sharding.windows import Halo, Padded, Pooling, Resampled, Sliding, Transposed, Window

HALO = "halo"  # a dim that the op slides a window over is sharded
REACH = {"nearest": 0, "linear": 1, "cubic": 2}  # inputs to either side that an interpolation reads
Windows = Iterable[tuple[int, Window]]  # by dim of the tensors


def each(value: Any, count: int) -> tuple[int, ...]:
    """A number per spatial dim, from one for all or one for each."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * count if len(numbers) == 1 else numbers


def halo_of(window: Window, source: TensorSpec, dim: int, *, tensor: int = 0, rounds: int = 1) -> Halo:
    """The halo of a tensor along `dim`."""
    return Halo(window, source.nbytes // max(1, source.shape[dim]), tensor, rounds)


def everywhere(call: OpCall, source: TensorSpec, windows: Windows) -> Iterator[Rule]:
    """Rules of an op all of whose tensors have the same dims. `source`: the tensor whose halo is sent."""
    for dim, window in windows:
        if min(window.size, window.results) > 1:
            shard = Shard(dim)
            inputs, outputs = (shard,) * len(call.inputs), (shard,) * len(call.outputs)
            yield Rule(inputs, outputs, form=HALO, halo=halo_of(window, source, dim))


def convolved(source: TensorSpec, out: TensorSpec, weight: TensorSpec, arguments: Sequence[Any]) -> Windows:
    """The windows of a convolution. `arguments`: stride, padding, dilation, transposed."""
    count = len(weight.shape) - 2
    stride, padding, dilation = (each(argument, count) for argument in arguments[:3])
    kind = Transposed if arguments[3] else Sliding
    for at in range(count):
        dim = at + 2
        sizes = source.shape[dim], out.shape[dim], weight.shape[dim]
        yield dim, kind(*sizes, stride[at], padding[at], dilation[at])


def pooled(source: TensorSpec, out: TensorSpec, count: int, arguments: Sequence[Any]) -> Windows:
    """The windows of a pool over the last `count` dims. `arguments`: kernel, stride, padding, dilation, ceil_mode."""
    kernel, stride, padding, dilation = (each(argument, count) for argument in arguments[:4])
    for at in range(count):
        dim = len(source.shape) - count + at
        numbers = kernel[at], (stride or kernel)[at], padding[at], dilation[at]
        yield dim, Pooling(source.shape[dim], out.shape[dim], *numbers, bool(arguments[4]))


def pooled_evenly(source: TensorSpec, out: TensorSpec, count: int) -> Windows:
    """The windows of an adaptive pool, where they are all of one size."""
    for dim in range(len(source.shape) - count, len(source.shape)):
        if source.shape[dim] % out.shape[dim] == 0:
            width = source.shape[dim] // out.shape[dim]
            yield dim, Sliding(source.shape[dim], out.shape[dim], width, width)


def resampled(source: TensorSpec, out: TensorSpec, count: int, mode: str, scales: Sequence[float | None]) -> Windows:
    """The windows of an interpolation that scales by a power of two, and was not told to scale by something else."""
    for at, scale in enumerate(scales):
        dim = len(source.shape) - count + at
        size, results = source.shape[dim], out.shape[dim]
        large, small = max(size, results), min(size, results)
        factor = large // small
        if large % small or factor & (factor - 1) or scale not in (None, results / size):
            continue
        reach = REACH[mode] if results >= size else int(mode == "cubic")
        yield dim, Resampled(size, results, reach)


def padded(source: TensorSpec, out: TensorSpec, amounts: Sequence[int], *, mode: str) -> Windows:
    """The windows of padding by `amounts`: before and after the last dim, then the one before it, and so on."""
    for at in range(len(amounts) // 2):
        dim = len(source.shape) - 1 - at
        if amounts[2 * at] or amounts[2 * at + 1]:
            yield dim, Padded(source.shape[dim], out.shape[dim], amounts[2 * at], mode == "reflection")
