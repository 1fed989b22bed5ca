"""Autopar's own ops on shards: where a shard lies in the full tensor is among their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch
from torch import fx
from torch.distributed.tensor import Partial

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.passes.moves import local_move
from autopar.sharding.layout import REPLICATE, Layout, shard_dim
from autopar.sharding.rules.custom import KEY_HEADS, KEYS

aten = torch.ops.aten
HEADS_DIM, LENGTH_DIM = 1, 2


def added(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(left, right, strict=True)]


def random(local: LocalCall) -> LocalValue:
    """(seed, shape, offset, full_shape, ...)."""
    seed, _, offset, *rest = local.args
    start, lengths = local.output_chunk()
    return local.build.op(local.call.target, seed, list(lengths), added(offset, start), *rest)


def placed_args(local: LocalCall, query: int) -> list[object]:
    """The arguments of an attention whose q is argument `query`, at the offset of this rank's scores."""
    args = list(local.args)
    (batch, head, row, _), _ = local.input_chunk(query)
    column = local.input_chunk(query + 1)[0][LENGTH_DIM]
    args[-2] = added(args[-2], (batch, head, row, column))
    return args


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
    """(q, k, v, mask, seed, ..., offset, full_shape)."""
    args = placed_args(local, 0)
    if local.axes_with(KEY_HEADS):
        heads = KeyHeads(local, 0)
        args[1:3] = [heads.cut(local.args[index], index) for index in (1, 2)]
    node = local.build.op(local.call.target, *args)
    out, lse = local.output(node, 0), local.output(node, 1)
    return merged(local, out, lse) if local.axes_with(KEYS) else (out, lse)


def merged(local: LocalCall, out: fx.Node, lse: fx.Node) -> LocalValue:
    """Addends of the attention over all keys, and its log-sum-exp, from those over this rank's keys."""
    build = local.build
    top = lse
    for axis in local.axes_with(KEYS):
        top = build.all_reduce(top, axis, "max")
    total = build.op(aten.exp.default, build.op(aten.sub.Tensor, lse, top))
    for axis in local.axes_with(KEYS):
        total = build.all_reduce(total, axis)
    whole = build.op(aten.add.Tensor, build.op(aten.log.default, total), top)
    share = build.op(aten.exp.default, build.op(aten.sub.Tensor, lse, whole))
    scaled = build.op(aten.mul.Tensor, out, build.op(aten.unsqueeze.default, share, -1))
    dtype = out.meta["val"].dtype
    if scaled.meta["val"].dtype != dtype:
        scaled = build.op(aten._to_copy.default, scaled, dtype=dtype)
    return scaled, whole


def attention_backward(local: LocalCall) -> LocalValue:
    """(grad_out, q, k, v, out, lse, mask, seed, ..., offset, full_shape)."""
    args = placed_args(local, 1)
    if not local.axes_with(KEY_HEADS):
        return local.build.op(local.call.target, *args)
    heads = KeyHeads(local, 1)
    args[2:4] = [heads.cut(local.args[index], index) for index in (2, 3)]
    node = local.build.op(local.call.target, *args)
    grad_k, grad_v = (heads.spread(local.output(node, index), index) for index in (1, 2))
    return local.output(node, 0), grad_k, grad_v


FORMS: Mapping[str, LocalForm] = {
    "autopar.attention.default": attention,
    "autopar.attention_backward.default": attention_backward,
    "autopar.random_mask.default": random,
    "autopar.random_uniform.default": random,
    "autopar.random_normal.default": random,
    "autopar.random_integers.default": random,
}
