"""Cutting and joining along a sharded dim, by one all-to-all: both sides are intervals of the longer tensor's dim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx

from autopar.passes.exchange import Exchange, Interval
from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.passes.moves import local_move
from autopar.sharding.layout import REPLICATE, Layout, chunk
from autopar.sharding.rules.exchange import EXCHANGED, dim_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Side:
    """Tensors that lie on the line, each from its own start; every rank holds a chunk of each."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    def by_rank(self, ranks: int) -> list[list[Interval]]:
        """What every rank holds of each tensor."""
        return [self._of_rank(rank, ranks) for rank in range(ranks)]

    def _of_rank(self, rank: int, ranks: int) -> list[Interval]:
        chunks = (chunk(length, ranks, rank) for length in self.lengths)
        return [(start + at, start + at + size) for start, (at, size) in zip(self.starts, chunks, strict=True)]


def exchange(local: LocalCall, axis: int, dim: int, have: Side, want: Side) -> Exchange:
    """What carries one side's chunks along `axis` to the other's."""
    ranks = local.geometry.mesh_shape[axis]
    return Exchange(local.build, axis, dim, have.by_rank(ranks), want.by_rank(ranks))


def gathered(local: LocalCall, tensors: Sequence[fx.Node]) -> tuple[list[fx.Node], tuple[int, ...]]:
    """The tensors with the dim whole, for a dim that several axes cut, and these axes."""
    axes = local.axes_with(EXCHANGED)
    whole = []
    for node, spec, layout in zip(tensors, local.call.inputs, local.strategy.inputs, strict=True):
        target: Layout = tuple(REPLICATE if axis in axes else each for axis, each in enumerate(layout))
        whole.append(local_move(local.build, node, spec.shape, layout, target))
    return whole, axes


def cut_again(local: LocalCall, results: Sequence[fx.Node], axes: Sequence[int]) -> tuple[fx.Node, ...]:
    """Results whose dim is whole, as the strategy wants them."""
    cut = []
    for node, spec, layout in zip(results, local.call.outputs, local.strategy.outputs, strict=True):
        assert spec is not None
        source: Layout = tuple(REPLICATE if axis in axes else each for axis, each in enumerate(layout))
        cut.append(local_move(local.build, node, spec.shape, source, layout))
    return tuple(cut)


def split(local: LocalCall) -> LocalValue:
    """`split`, `split_with_sizes` (self, sizes, dim)."""
    axes, source = local.axes_with(EXCHANGED), local.args[0]
    dim = dim_of(local.call, 2)
    if not axes:
        return local.plain()
    if len(axes) > 1:
        (whole,), _ = gathered(local, [source])
        pieces = local.build.op(local.call.target, whole, *local.args[1:])
        return cut_again(local, [local.output(pieces, i) for i in range(len(local.call.outputs))], axes)
    lengths = tuple(spec.shape[dim] for spec in local.call.outputs if spec is not None)
    line = Side((0,), (local.call.inputs[0].shape[dim],))
    return exchange(local, axes[0], dim, line, Side(_starts(lengths), lengths)).run([source])


def cat(local: LocalCall) -> LocalValue:
    """`cat(tensors, dim)`."""
    axes, tensors = local.axes_with(EXCHANGED), list(local.args[0])
    dim = dim_of(local.call, 1)
    if not axes:
        return local.plain()
    if len(axes) > 1:
        whole, _ = gathered(local, tensors)
        return cut_again(local, [local.build.op(aten.cat.default, whole, dim)], axes)[0]
    lengths = tuple(spec.shape[dim] for spec in local.call.inputs)
    have = Side(_starts(lengths), lengths)
    return exchange(local, axes[0], dim, have, Side((0,), (sum(lengths),))).run(tensors)[0]


def cut_out(local: LocalCall) -> LocalValue:
    """`slice(self, dim, start, end, step)`."""
    axes, source = local.axes_with(EXCHANGED), local.args[0]
    if not axes:
        return local.plain()
    if len(axes) > 1:
        (whole,), _ = gathered(local, [source])
        return cut_again(local, [local.build.op(local.call.target, whole, *local.args[1:])], axes)[0]
    dim, size = dim_of(local.call, 1), _full_size(local)
    length = local.call.inputs[0].shape[dim]
    want = Side((_first(local.call.argument(2, "start"), length),), (size[dim],))
    return exchange(local, axes[0], dim, Side((0,), (length,)), want).run([source])[0]


def put_back(local: LocalCall) -> LocalValue:
    """`slice_backward(grad, input_sizes, dim, start, end, step)`: zeros around the gradient."""
    axes, (grad, _, dim, start, *rest) = local.axes_with(EXCHANGED), local.args
    size, here = _full_size(local), list(local.output_chunk()[1])
    if not axes:
        return local.build.op(local.call.target, grad, here, dim, start, *rest)
    dim = dim_of(local.call, 2)
    if len(axes) > 1:
        (whole,), _ = gathered(local, [grad])
        here[dim] = size[dim]
        return cut_again(local, [local.build.op(local.call.target, whole, here, dim, start, *rest)], axes)[0]
    have = Side((_first(start, size[dim]),), (local.call.inputs[0].shape[dim],))
    return exchange(local, axes[0], dim, have, Side((0,), (size[dim],))).run([grad])[0]


def _full_size(local: LocalCall) -> tuple[int, ...]:
    spec = local.call.outputs[0]
    assert spec is not None
    return spec.shape


def _first(start: int | None, length: int) -> int:
    """Where a slice starts, counted from the front."""
    start = start or 0
    return min(length, max(0, start + length if start < 0 else start))


def _starts(lengths: Sequence[int]) -> tuple[int, ...]:
    """Where tensors start that lie one after the other."""
    return (0, *accumulate(lengths[:-1]))


FORMS: Mapping[str, LocalForm] = {
    "aten.split.Tensor": split,
    "aten.split_with_sizes.default": split,
    "aten.cat.default": cat,
    "aten.slice.Tensor": cut_out,
    "aten.slice_backward.default": put_back,
}
