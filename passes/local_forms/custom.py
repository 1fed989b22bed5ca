"""Autopar's own ops on shards: where a shard lies in the full tensor is among their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import fx

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
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


def used_key_heads(local: LocalCall, query: int) -> list[int]:
    """Per query head of this rank, the key head it reads."""
    query_heads, key_heads = (local.call.inputs[index].shape[HEADS_DIM] for index in (query, query + 1))
    offsets, lengths = local.input_chunk(query)
    start = offsets[HEADS_DIM]
    group = query_heads // key_heads
    return [head // group for head in range(start, start + lengths[HEADS_DIM])]


def evenly_used(heads: Sequence[int]) -> bool:
    """Whether each key head serves equally many of the rank's query heads."""
    return len({len(list(run)) for _, run in groupby(heads)}) == 1


def cut_heads(local: LocalCall, value: fx.Node, heads: Sequence[int]) -> fx.Node:
    """The key heads that are read; one per query head where they serve unequally many."""
    build = local.build
    if evenly_used(heads):
        return build.op(aten.slice.Tensor, value, HEADS_DIM, heads[0], heads[-1] + 1)
    return build.op(aten.cat.default, [build.op(aten.slice.Tensor, value, HEADS_DIM, h, h + 1) for h in heads], 1)


def spread_heads(local: LocalCall, grad: fx.Node, heads: Sequence[int], count: int) -> fx.Node:
    """The gradient of all `count` key heads from that of `cut_heads`: zero where they are not read."""
    build = local.build
    if not evenly_used(heads):
        runs = [[position for position, _ in run] for _, run in groupby(enumerate(heads), key=lambda item: item[1])]
        parts = [build.op(aten.slice.Tensor, grad, HEADS_DIM, run[0], run[-1] + 1) for run in runs]
        sums = [build.op(aten.sum.dim_IntList, part, [HEADS_DIM], True) for part in parts]
        grad = build.op(aten.cat.default, sums, HEADS_DIM)
    padding = [0, 0, 0, 0, heads[0], count - heads[-1] - 1]
    return build.op(aten.constant_pad_nd.default, grad, padding, 0.0)


def attention(local: LocalCall) -> LocalValue:
    """(q, k, v, mask, seed, ..., offset, full_shape)."""
    args = placed_args(local, 0)
    if local.axes_with(KEY_HEADS):
        heads = used_key_heads(local, 0)
        args[1:3] = [cut_heads(local, node, heads) for node in local.args[1:3]]
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
    heads, count = used_key_heads(local, 1), local.input_chunk(2)[1][HEADS_DIM]
    args[2:4] = [cut_heads(local, node, heads) for node in local.args[2:4]]
    node = local.build.op(local.call.target, *args)
    grad_k, grad_v = (spread_heads(local, local.output(node, index), heads, count) for index in (1, 2))
    return local.output(node, 0), grad_k, grad_v


FORMS: Mapping[str, LocalForm] = {
    "autopar.attention.default": attention,
    "autopar.attention_backward.default": attention_backward,
    "autopar.random_mask.default": random,
    "autopar.random_uniform.default": random,
    "autopar.random_normal.default": random,
    "autopar.random_integers.default": random,
}
