"""Checks that PyTorch's own functions make on a tensor's values: there are none yet, so they are answered here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch.distributions import Distribution
from torch.nn import functional as F
from torch.nn.modules import transformer

from autopar.capture.replacements.draw import Draw

OWN_MODULES = ("autopar.", "contextlib", "torch.overrides", "torch._tensor")

# What the truth of a tensor is taken for inside these functions: the input is valid; a mask is not known to be causal,
# which only keeps it from being replaced by a faster equal one.
ANSWERS: Mapping[CodeType, bool] = {
    F.gaussian_nll_loss.__code__: False,
    transformer._detect_is_causal_mask.__code__: False,
    Distribution.__init__.__code__: True,
    Distribution._validate_sample.__code__: True,
}


def calling_code() -> CodeType | None:
    """The code that called the replaced function: the innermost that is not the interception itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(OWN_MODULES):
        frame = frame.f_back
    return None if frame is None else frame.f_code


def truth(draw: Draw, value: torch.Tensor) -> Any:
    """`bool(value)`, where one of PyTorch's checks asks for it."""
    code = calling_code()
    return ANSWERS.get(code, NotImplemented) if code is not None else NotImplemented


def one_hot(draw: Draw, tensor: torch.Tensor, num_classes: int = -1) -> Any:
    """F.one_hot without its look at the largest class."""
    if num_classes < 0:
        return NotImplemented
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)


CHECK_REPLACEMENTS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.__bool__: truth,
    F.one_hot: one_hot,
}
