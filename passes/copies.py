"""Copies between the device and the host that emitted graphs hold: what starts one, and what waits for it."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ops import packing as _packing  # noqa: F401  (registers the ops)

OFFLOAD, RELOAD = torch.ops.autopar.offload.default, torch.ops.autopar.reload.default
WAIT_COPY = torch.ops.autopar.wait_copy.default


def is_copy(node: fx.Node) -> bool:
    """Whether `node` starts a copy to the host or back."""
    return node.op == "call_function" and node.target in (OFFLOAD, RELOAD)


def is_copy_wait(node: fx.Node) -> bool:
    """Whether `node` waits until a copy is complete."""
    return node.op == "call_function" and node.target is WAIT_COPY
