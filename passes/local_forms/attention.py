"""Attention on shards: heads that queries read elsewhere, and keys that are cut along the sequence.

A softmax over some of the keys is merged with others by their log-sum-exps, which is exact. Keys stay where they are,
and the ranks' results are merged by all-reduces (`KEYS`), or they go around the ring of an axis (`RING`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch
from torch import fx
from torch.distributed.tensor import Partial

from autopar.passes.attention_blocks import LENGTH_DIM, NOTHING, Attention, Result, finite, merged, merged_over_axes
from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.passes.local_forms.precision import converted, output_dtype, widened
from autopar.passes.moves import local_move
from autopar.passes.ring import passed_on, turns
from autopar.sharding.layout import REPLICATE, Layout, shard_dim
from autopar.sharding.rules.custom import KEY_HEADS, KEYS, RING

aten = torch.ops.aten
HEADS_DIM = 1


@dataclass(frozen=True)
class KeyHeads:
    """The key heads that a rank's queries read, where k and v are not cut along with q."""

    local: LocalCall
    query: int  # the position of q; k follows

    @property
    def held(self) -> Layout:
        """The layout in which the rank needs k and v."""
        layout = self.local.strategy.inputs[self.query + 1]
        return tuple(REPLICATE if self.strays(axis) else item for axis, item in enumerate(layout))

    def strays(self, axis: int) -> bool:
        """Whether `axis` cuts k after an axis that cut q alone: the heads read may then lie on another rank."""
        alone = self.local.axes_with(KEY_HEADS)
        layout = self.local.strategy.inputs[self.query + 1]
        return shard_dim(layout[axis]) == HEADS_DIM and axis > alone[0]

    @property
    def read(self) -> list[int]:
        """Per query head of this rank, the key head it reads, counted within what `held` holds."""
        query_heads, key_heads = (self.local.call.inputs[self.query + index].shape[HEADS_DIM] for index in (0, 1))
        offsets, lengths = self.local.input_chunk(self.query)
        shape = self.local.call.inputs[self.query + 1].shape
        first = self.local.geometry.chunk(shape, self.held)[0][HEADS_DIM]
        group = query_heads // key_heads
        start = offsets[HEADS_DIM]
        return [head // group - first for head in range(start, start + lengths[HEADS_DIM])]

    def cut(self, value: fx.Node, index: int) -> fx.Node:
        """What is read of tensor input `index`; a head per query head where heads serve unequally many."""
        build, call = self.local.build, self.local.call
        value = local_move(build, value, call.inputs[index].shape, self.local.strategy.inputs[index], self.held)
        heads = self.read
        if evenly_used(heads):
            return build.op(aten.slice.Tensor, value, HEADS_DIM, heads[0], heads[-1] + 1)
        return build.op(aten.cat.default, [build.op(aten.slice.Tensor, value, HEADS_DIM, h, h + 1) for h in heads], 1)

    def spread(self, grad: fx.Node, index: int) -> fx.Node:
        """Output `index` from the gradient of what `cut` gave: zero for heads that are not read."""
        build, heads = self.local.build, self.read
        if not evenly_used(heads):
            runs = [[place for place, _ in run] for _, run in groupby(enumerate(heads), key=itemgetter(1))]
            parts = [build.op(aten.slice.Tensor, grad, HEADS_DIM, run[0], run[-1] + 1) for run in runs]
            sums = [build.op(aten.sum.dim_IntList, part, [HEADS_DIM], True) for part in parts]
            grad = build.op(aten.cat.default, sums, HEADS_DIM)
        shape = self.local.call.inputs[self.query + 1].shape
        count = self.local.geometry.chunk(shape, self.held)[1][HEADS_DIM]
        whole = build.op(aten.constant_pad_nd.default, grad, [0, 0, 0, 0, heads[0], count - heads[-1] - 1], 0.0)
        target = self.local.strategy.outputs[index]
        source = tuple(Partial() if self.strays(axis) else item for axis, item in enumerate(target))
        return local_move(build, whole, shape, source, target)


def evenly_used(heads: Sequence[int]) -> bool:
    """Whether each key head serves equally many of the rank's query heads."""
    return len({len(list(run)) for _, run in groupby(heads)}) == 1


def attention(local: LocalCall) -> LocalValue:
    """(q, k, v, mask, seed, ..., offset, full_shape) -> (out, lse)."""
    build, own = local.build, own_attention(local, 0)
    if not in_blocks(local):
        node = own.plain()
        return local.output(node, 0), local.output(node, 1)
    out, lse = around_the_ring(own) or nothing(local)
    if local.axes_with(KEYS):
        out, lse = merged_over_axes(build, local.axes_with(KEYS), (out, lse))
    return converted(local, out, output_dtype(local)), finite(build, lse)


def own_attention(local: LocalCall, query: int) -> Attention:
    """This rank's queries against the keys that it holds."""
    args = list(local.args)
    if local.axes_with(KEY_HEADS):
        heads = KeyHeads(local, query)
        args[query + 1 : query + 3] = [heads.cut(args[index], index) for index in (query + 1, query + 2)]
    return Attention(local, query, tuple(args), local.geometry.coordinates)


def in_blocks(local: LocalCall) -> bool:
    """Whether a rank's queries meet some of their keys at a time."""
    return bool(local.axes_with(KEYS) or local.axes_with(RING))


def around_the_ring(own: Attention) -> Result | None:
    """The attention over the keys of all ranks of the rings, block by block; without a ring, over this rank's."""
    local, block = own.local, own
    result = own.result()
    for axis in turns(local.geometry.mesh_shape, local.axes_with(RING)):
        block = block.turned(axis)
        found = block.result()
        if found is not None:
            result = found if result is None else merged(local.build, result, found)
    return result


def nothing(local: LocalCall) -> Result:
    """What a rank adds without a single key for its queries."""
    out, lse = (list(local.output_chunk(index)[1]) for index in range(2))
    spec = local.call.outputs[1]
    assert spec is not None
    zeros = local.build.op(aten.new_zeros.default, local.args[0], out)
    return zeros, local.build.op(aten.new_full.default, local.args[0], lse, NOTHING, dtype=spec.dtype)


def attention_backward(local: LocalCall) -> LocalValue:
    """(grad_out, q, k, v, out, lse, mask, seed, ..., offset, full_shape) -> gradients of q, k and v."""
    own = own_attention(local, 1)
    if in_blocks(local):
        of_q, of_k, of_v = gradients_around_the_ring(own)
    else:
        node = own.plain()
        of_q, of_k, of_v = (local.output(node, index) for index in range(3))
    if local.axes_with(KEY_HEADS):
        heads = KeyHeads(local, 1)
        of_k, of_v = heads.spread(of_k, 1), heads.spread(of_v, 2)
    return of_q, of_k, of_v


def gradients_around_the_ring(own: Attention) -> tuple[fx.Node, fx.Node, fx.Node]:
    """What this rank's queries add to their own gradient, and what all add to that of the keys, which go around."""
    local, block, axes = own.local, own, own.local.axes_with(RING)
    of_q, *of_keys = own.gradients() or [
        local.build.op(aten.new_zeros.default, node, list(node.meta["val"].shape)) for node in own.args[1:4]
    ]
    of_q = widened(local, of_q)
    for axis in turns(local.geometry.mesh_shape, axes):
        block = block.turned(axis)
        of_keys = passed_on(local.build, of_keys, axis, LENGTH_DIM, block.keys[1])
        found = block.gradients()
        if found is not None:
            of_q = added(local, of_q, found[0])
            of_keys = [added(local, *pair) for pair in zip(of_keys, found[1:], strict=True)]
    of_k, of_v = taken_home(block, axes, of_keys)
    return converted(local, of_q, own.args[1].meta["val"].dtype), of_k, of_v


def taken_home(block: Attention, axes: Sequence[int], of_keys: list[fx.Node]) -> list[fx.Node]:
    """The gradients of the keys that a rank has last, given to the rank whose keys they are."""
    local, home = block.local, block.holder
    for axis in axes:
        here = local.geometry.coordinates[axis]
        home = (*home[:axis], here, *home[axis + 1 :])
        steps = block.holder[axis] - here
        of_keys = passed_on(local.build, of_keys, axis, LENGTH_DIM, block.at(home).keys[1], steps)
    return of_keys


def added(local: LocalCall, left: fx.Node, right: fx.Node) -> fx.Node:
    return local.build.op(aten.add.Tensor, left, right)


FORMS: Mapping[str, LocalForm] = {
    "autopar.attention.default": attention,
    "autopar.attention_backward.default": attention_backward,
}
