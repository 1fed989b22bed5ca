"""Cutting and joining along a sharded dim, by one all-to-all.

Both sides are intervals on one line, the dim of the longer tensor. Each rank knows which intervals every rank has and
wants, so it sends each rank the parts that they share, in the order of the line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import fx

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.passes.moves import local_move
from autopar.sharding.layout import REPLICATE, Layout, chunk
from autopar.sharding.rules.exchange import EXCHANGED, dim_of

aten = torch.ops.aten
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
Interval = tuple[int, int]  # start and end on the line


@dataclass(frozen=True)
class Side:
    """Tensors that lie on the line, each from its own start; every rank holds a chunk of each."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    def of_rank(self, rank: int, ranks: int) -> list[Interval]:
        """What a rank holds of each tensor."""
        chunks = (chunk(length, ranks, rank) for length in self.lengths)
        return [(start + at, start + at + size) for start, (at, size) in zip(self.starts, chunks, strict=True)]


@dataclass(frozen=True, order=True)
class Part:
    """An interval that one tensor has and another wants."""

    start: int
    end: int
    holder: int
    wanter: int

    @property
    def length(self) -> int:
        return self.end - self.start


def shared(have: Sequence[Interval], want: Sequence[Interval]) -> list[Part]:
    """The parts that are on both sides, in the order of the line."""
    pairs = ((i, j, *one, *other) for i, one in enumerate(have) for j, other in enumerate(want))
    parts = (Part(max(a, c), min(b, d), i, j) for i, j, a, b, c, d in pairs)
    return sorted(part for part in parts if part.length > 0)


@dataclass(frozen=True)
class Exchange:
    """One all-to-all over a mesh axis along `dim`."""

    local: LocalCall
    axis: int
    dim: int
    have: Side
    want: Side

    def run(self, tensors: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """This rank's chunk of every wanted tensor; zeros where nobody has anything."""
        build, ranks = self.local.build, range(self._ranks)
        mine, wanted = self._interval(self.have, self._here), self._interval(self.want, self._here)
        sent = [shared(mine, self._interval(self.want, rank)) for rank in ranks]
        coming = [shared(self._interval(self.have, rank), wanted) for rank in ranks]
        row = prod(self._sizes(tensors[0], 1))
        flat = [self._flat_part(tensors[part.holder], part, mine) for parts in sent for part in parts]
        packed = build.op(aten.cat.default, flat) if flat else build.op(aten.new_zeros.default, tensors[0], [0])
        counts = [[row * sum(part.length for part in parts) for parts in side] for side in (coming, sent)]
        group = self.local.geometry.group_names[self.axis]
        received = build.collective(ALL_TO_ALL, packed, (sum(counts[0]),), *counts, group)
        arrived = [part for parts in coming for part in parts]
        pieces = build.op(aten.split_with_sizes.default, received, [row * part.length for part in arrived])
        named = {part: self.local.output(pieces, index) for index, part in enumerate(arrived)}
        return tuple(self._assembled(index, span, named, tensors[0]) for index, span in enumerate(wanted))

    @property
    def _here(self) -> int:
        return self.local.geometry.coordinates[self.axis]

    @property
    def _ranks(self) -> int:
        return self.local.geometry.mesh_shape[self.axis]

    def _interval(self, side: Side, rank: int) -> list[Interval]:
        return side.of_rank(rank, self._ranks)

    def _sizes(self, like: fx.Node, length: int) -> list[int]:
        """The local sizes, with `length` in the dim of the line."""
        return [length if dim == self.dim else size for dim, size in enumerate(like.meta["val"].shape)]

    def _flat_part(self, tensor: fx.Node, part: Part, mine: Sequence[Interval]) -> fx.Node:
        build, start = self.local.build, part.start - mine[part.holder][0]
        cut = build.op(aten.slice.Tensor, tensor, self.dim, start, start + part.length)
        whole = build.op(aten.clone.default, cut, memory_format=torch.contiguous_format)
        return build.op(aten.view.default, whole, [-1])

    def _assembled(self, index: int, span: Interval, named: Mapping[Part, fx.Node], like: fx.Node) -> fx.Node:
        """The parts of one wanted tensor in the order of the line, with zeros in the gaps."""
        build, at, pieces = self.local.build, span[0], list[fx.Node]()
        parts = sorted(part for part in named if part.wanter == index)
        for part in (*parts, Part(span[1], span[1], 0, index)):
            if part.start > at:
                pieces.append(build.op(aten.new_zeros.default, like, self._sizes(like, part.start - at)))
            if part.length:
                pieces.append(build.op(aten.view.default, named[part], self._sizes(like, part.length)))
            at = part.end
        return pieces[0] if len(pieces) == 1 else build.op(aten.cat.default, pieces, self.dim)


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
    return Exchange(local, axes[0], dim, line, Side(_starts(lengths), lengths)).run([source])


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
    return Exchange(local, axes[0], dim, have, Side((0,), (sum(lengths),))).run(tensors)[0]


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
    return Exchange(local, axes[0], dim, Side((0,), (length,)), want).run([source])[0]


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
    return Exchange(local, axes[0], dim, have, Side((0,), (size[dim],))).run([grad])[0]


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
