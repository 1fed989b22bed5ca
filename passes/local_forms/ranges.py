"""Looking things up in a dim of which a rank holds only a range."""

from __future__ import annotations

import torch
from torch import fx

from autopar.passes.local_call import GraphBuilder

aten = torch.ops.aten


def shift_into_range(build: GraphBuilder, index: fx.Node, start: int, length: int) -> tuple[fx.Node, fx.Node]:
    """(index counted from the start of the range, mask of what lies outside of it)."""
    shifted = build.op(aten.sub.Tensor, index, start) if start else index
    below, above = build.op(aten.lt.Scalar, shifted, 0), build.op(aten.ge.Scalar, shifted, length)
    return shifted, build.op(aten.bitwise_or.Tensor, below, above)


def clear(build: GraphBuilder, value: fx.Node, mask: fx.Node, number: float = 0) -> fx.Node:
    """`value` with `number` where `mask` holds."""
    return build.op(aten.masked_fill.Scalar, value, mask, number)


def append_dims(build: GraphBuilder, node: fx.Node, count: int) -> fx.Node:
    """`count` dims of size one behind the others, so that a mask broadcasts over them."""
    for _ in range(count):
        node = build.op(aten.unsqueeze.default, node, -1)
    return node
