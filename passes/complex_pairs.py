"""Complex tensors as pairs of reals and back, whatever the strides and lazy conjugations of one rank's shard are."""

from __future__ import annotations

import torch
from torch import fx

from autopar.passes.local_call import GraphBuilder

aten = torch.ops.aten


def as_pairs(build: GraphBuilder, value: fx.Node) -> fx.Node:
    """`aten.view_as_real`, which refuses a tensor whose conjugation is still put off."""
    if value.meta["val"].is_conj():
        value = build.op(aten.resolve_conj.default, value)
    return build.op(aten.view_as_real.default, value)


def from_pairs(build: GraphBuilder, value: fx.Node) -> fx.Node:
    """`aten.view_as_complex`, which refuses a tensor whose pairs do not lie side by side."""
    tensor: torch.Tensor = value.meta["val"]
    odd = any(stride % 2 for stride in tensor.stride()[:-1]) or tensor.storage_offset() % 2
    if tensor.stride(-1) != 1 or odd:
        value = build.op(aten.clone.default, value, memory_format=torch.contiguous_format)
    return build.op(aten.view_as_complex.default, value)
