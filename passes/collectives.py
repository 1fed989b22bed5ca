"""The collectives that emitted graphs hold, by kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.ops import dispatch as _dispatch  # noqa: F401  (registers autopar::all_to_all_rows)

_c10d = torch.ops._c10d_functional

WAIT = _c10d.wait_tensor.default
KIND_OF: dict[object, str] = {
    _c10d.all_reduce.default: "all_reduce",
    _c10d.all_gather_into_tensor.default: "all_gather",
    _c10d.reduce_scatter_tensor.default: "reduce_scatter",
    _c10d.all_to_all_single.default: "all_to_all",
    _c10d.broadcast.default: "broadcast",
    torch.ops.autopar.all_to_all_rows.default: "all_to_all",
}


def is_collective(node: fx.Node) -> bool:
    """Whether `node` starts a collective."""
    return node.op == "call_function" and node.target in KIND_OF


def is_wait(node: fx.Node) -> bool:
    """Whether `node` waits for a collective's result."""
    return node.op == "call_function" and node.target is WAIT


def collective_kind(node: fx.Node) -> str:
    """all_reduce, all_gather, reduce_scatter, all_to_all or broadcast."""
    return KIND_OF[node.target]


def collective_splits(node: fx.Node) -> tuple[list[int], list[int]] | None:
    """What an all-to-all receives from each rank and sends each; None where that is known at run time alone."""
    args: Any = node.args
    return (args[1], args[2]) if node.target is _c10d.all_to_all_single.default else None
