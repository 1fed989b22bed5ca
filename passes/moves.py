"""Moves: a tensor carried from one layout to another, as slices and collectives on the local shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from autopar.passes.complex_pairs import as_pairs, from_pairs
from autopar.passes.local_call import GraphBuilder
from autopar.sharding.layout import Layout, chunk, shard_dim
from autopar.sharding.op_call import TensorSpec
from autopar.sharding.reshard import Step, reshard_path

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def move(x: Tensor, source: str, target: str) -> Tensor:
    """`x`, carried from layout `source` to layout `target` (as `format_layout` writes them): the same value."""
    return x


def local_move(build: GraphBuilder, value: fx.Node, shape: tuple[int, ...], source: Layout, target: Layout) -> fx.Node:
    """Emit what carries this rank's shard of a tensor of full `shape` from `source` to `target`.

    Uneven chunks are padded to equal length for a collective, and cut afterwards; whether they are is a fact of the
    shape and the mesh, so that every rank emits the same collectives in the same order. What a collective starts is
    waited for at once; `schedule_collectives` spreads the two.
    """
    mesh_shape = build.geometry.mesh_shape
    spec = TensorSpec(shape, value.meta["val"].dtype)
    layout = source
    for step in reshard_path(spec, source, target, mesh_shape):
        after = (*layout[: step.axis], step.target, *layout[step.axis + 1 :])
        value = _STEPS[step.collective](_Change(build, shape, step, layout, after), value)
        layout = after
    return value


@dataclass(frozen=True)
class _Change:
    """One step on one tensor, as one rank sees it."""

    build: GraphBuilder
    shape: tuple[int, ...]
    step: Step
    before: Layout
    after: Layout

    @property
    def ranks(self) -> int:
        return self.build.geometry.mesh_shape[self.step.axis]

    @property
    def group(self) -> str:
        return self.build.geometry.group_names[self.step.axis]

    def length(self, layout: Layout, dim: int) -> int:
        """How long this rank's shard in `layout` is along `dim`."""
        return self.build.geometry.chunk(self.shape, layout)[1][dim]

    def padded_length(self, dim: int) -> int:
        """The length of the longest chunk of `dim` in this rank's group: what all are padded to."""
        whole = self.after if shard_dim(self.step.source) == dim else self.before
        return -(-self.length(whole, dim) // self.ranks)

    def is_uneven(self, dim: int) -> bool:
        """Whether any group along this axis, anywhere in the mesh, cuts `dim` in chunks of different lengths."""
        lengths = {self.shape[dim]}
        for placement, ranks in zip(self.before[: self.step.axis], self.build.geometry.mesh_shape, strict=False):
            if shard_dim(placement) == dim:
                lengths = {chunk(length, ranks, index)[1] for length in lengths for index in range(ranks)}
        return any(length % self.ranks for length in lengths)


def _slice(change: _Change, value: fx.Node) -> fx.Node:
    """Replicate to Shard: keep this rank's chunk. A copy, so that the full value can be freed (inputs stay anyway)."""
    dim = _dim(change.step.target)
    geometry = change.build.geometry
    begin = geometry.chunk(change.shape, change.before)[0][dim]
    offsets, lengths = geometry.chunk(change.shape, change.after)
    start, length = offsets[dim] - begin, lengths[dim]
    kept = change.build.op(aten.slice.Tensor, value, dim, start, start + length)
    if value.op == "placeholder" and dim == 0:
        return kept
    return _copied(change.build, kept)


def _all_reduce(change: _Change, value: fx.Node) -> fx.Node:
    """Partial to Replicate."""
    build = change.build
    assert isinstance(change.step.source, Partial)
    reduce_op = change.step.source.reduce_op
    sent = packed(build, _as_carrier(build, value))
    total = build.all_reduce(sent, change.step.axis, "sum" if reduce_op == "avg" else reduce_op)
    if reduce_op == "avg":  # gloo has no mean
        total = build.op(aten.div.Tensor, total, change.ranks)
    return _from_carrier(build, total, value.meta["val"].dtype)


def _all_gather(change: _Change, value: fx.Node) -> fx.Node:
    """Shard to Replicate: collectives join chunks along dim 0, so other dims are moved there and back."""
    build, dim = change.build, _dim(change.step.source)
    sent = packed(build, _padded(change, _as_carrier(build, value), dim))
    rows, *rest = sent.meta["val"].shape
    shape = (rows * change.ranks, *rest)
    gathered = build.collective(c10d.all_gather_into_tensor.default, sent, shape, change.ranks, change.group)
    whole = _cut(change, _join_chunks(change, gathered, dim), dim)
    return _from_carrier(build, whole, value.meta["val"].dtype)


def _reduce_scatter(change: _Change, value: fx.Node) -> fx.Node:
    """Partial to Shard."""
    build, dim = change.build, _dim(change.step.target)
    whole = _padded(change, _as_carrier(build, value), dim)
    sent = packed(build, _split_chunks(change, whole, dim))
    rows, *rest = sent.meta["val"].shape
    shape = (rows // change.ranks, *rest)
    own = build.collective(c10d.reduce_scatter_tensor.default, sent, shape, "sum", change.ranks, change.group)
    return _from_carrier(build, _cut(change, own, dim), value.meta["val"].dtype)


def _all_to_all(change: _Change, value: fx.Node) -> fx.Node:
    """Shard to Shard: chunk j of the newly cut dim goes to rank j, and the old chunks are joined."""
    build, old, new = change.build, _dim(change.step.source), _dim(change.step.target)
    sent = _as_carrier(build, value)
    for dim in (old, new):
        sent = _padded(change, sent, dim)
    sent = packed(build, _split_chunks(change, sent, new))
    shape = sent.meta["val"].shape
    each = [shape[0] // change.ranks] * change.ranks
    received = build.collective(c10d.all_to_all_single.default, sent, shape, each, each, change.group)
    whole = _cut(change, _cut(change, _join_chunks(change, received, old), old), new)
    return _from_carrier(build, whole, value.meta["val"].dtype)


_STEPS = {
    None: _slice,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _dim(placement: Placement) -> int:
    dim = shard_dim(placement)
    assert dim is not None
    return dim


def _padded(change: _Change, value: fx.Node, dim: int) -> fx.Node:
    """`value` with `dim` lengthened by zeros to what its group agrees on; untouched where all chunks are equal."""
    if not change.is_uneven(dim):
        return value
    cut_after = shard_dim(change.step.target) == dim  # then the whole dim is here, and must divide
    length = change.padded_length(dim) * (change.ranks if cut_after else 1)
    tensor = value.meta["val"]
    padding = [0, 0] * (tensor.dim() - 1 - dim) + [0, length - tensor.shape[dim]]
    return change.build.op(aten.constant_pad_nd.default, value, padding)


def _cut(change: _Change, value: fx.Node, dim: int) -> fx.Node:
    """`value` without the padding of `_padded`."""
    if not change.is_uneven(dim):
        return value
    kept = change.build.op(aten.slice.Tensor, value, dim, 0, change.length(change.after, dim))
    return packed(change.build, kept)


def _join_chunks(change: _Change, value: fx.Node, dim: int) -> fx.Node:
    """Chunks that lie one after the other along dim 0, put one after the other along `dim`."""
    if dim == 0:
        return value
    build = change.build
    chunks = build.op(aten.unflatten.int, value, 0, [change.ranks, value.meta["val"].shape[0] // change.ranks])
    return build.op(aten.flatten.using_ints, build.op(aten.movedim.int, chunks, 0, dim), dim, dim + 1)


def _split_chunks(change: _Change, value: fx.Node, dim: int) -> fx.Node:
    """The inverse of `_join_chunks`."""
    if dim == 0:
        return value
    build = change.build
    chunks = build.op(aten.unflatten.int, value, dim, [change.ranks, value.meta["val"].shape[dim] // change.ranks])
    return build.op(aten.flatten.using_ints, build.op(aten.movedim.int, chunks, dim, 0), 0, 1)


def packed(build: GraphBuilder, value: fx.Node) -> fx.Node:
    """`value` in contiguous memory. Strides decide, not sizes, so that ranks agree whose chunks have other sizes."""
    tensor = value.meta["val"]
    if tuple(tensor.stride()) == _contiguous_strides(tensor.shape):
        return value
    return _copied(build, value)


def _copied(build: GraphBuilder, value: fx.Node) -> fx.Node:
    return build.op(aten.clone.default, value, memory_format=torch.contiguous_format)


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(int(size), 1)
    return tuple(reversed(strides))


def _as_carrier(build: GraphBuilder, value: fx.Node) -> fx.Node:
    """`value` in a dtype that every backend carries: complex as pairs of reals, int16 as int32."""
    dtype = value.meta["val"].dtype
    if dtype.is_complex:
        return as_pairs(build, value)
    if dtype == torch.int16:
        return build.op(aten._to_copy.default, value, dtype=torch.int32)
    return value


def _from_carrier(build: GraphBuilder, value: fx.Node, dtype: torch.dtype) -> fx.Node:
    if dtype.is_complex:
        return from_pairs(build, value)
    if dtype == torch.int16:
        return build.op(aten._to_copy.default, value, dtype=dtype)
    return value
