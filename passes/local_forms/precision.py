"""The precision in which a local form computes: that of PyTorch's own kernels."""

from __future__ import annotations

import torch
from torch import fx

from autopar.passes.local_call import LocalCall

aten = torch.ops.aten
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # what PyTorch's kernels accumulate in


def converted(local: LocalCall, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """`node` in `dtype`."""
    return node if node.meta["val"].dtype == dtype else local.build.op(aten._to_copy.default, node, dtype=dtype)


def widened(local: LocalCall, node: fx.Node) -> fx.Node:
    """`node` in the dtype in which sums are taken."""
    dtype = node.meta["val"].dtype
    return converted(local, node, WIDER.get(dtype, dtype))


def output_dtype(local: LocalCall) -> torch.dtype:
    spec = local.call.outputs[0]
    assert spec is not None
    return spec.dtype
