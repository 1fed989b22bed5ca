"""The same replacements for ATen overloads, as exported programs and fx graphs call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from autopar.capture.replacements.attention import ATTENTION_REPLACEMENTS
from autopar.capture.replacements.checks import CHECK_REPLACEMENTS
from autopar.capture.replacements.draw import Draw
from autopar.capture.replacements.experts import EXPERT_REPLACEMENTS
from autopar.capture.replacements.loss import ctc_loss
from autopar.capture.replacements.normalization import NORMALIZATION_REPLACEMENTS
from autopar.capture.replacements.randomness import RANDOM_REPLACEMENTS
from autopar.capture.replacements.recurrent import RECURRENT_REPLACEMENTS

aten = torch.ops.aten
REDUCTIONS = ("none", "mean", "sum")  # by ATen's number

# Built-in functions; Python functions such as F.dropout have arguments of their own.
BUILT_IN: Mapping[str, Callable[..., Any]] = {
    function.__name__: replacement
    for table in (
        RANDOM_REPLACEMENTS,
        ATTENTION_REPLACEMENTS,
        NORMALIZATION_REPLACEMENTS,
        RECURRENT_REPLACEMENTS,
        EXPERT_REPLACEMENTS,
        CHECK_REPLACEMENTS,
    )
    for function, replacement in table.items()
    if not isinstance(function, FunctionType)
}


def native_dropout(draw: Draw, input: Tensor, p: float, train: bool | None) -> Any:  # noqa: A002, FBT001
    """(output, mask)."""
    if train is False or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    mask = draw.mask(input.shape, 1 - p)
    return input * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def aten_ctc_loss(
    draw: Draw, log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *options: Any
) -> Any:
    """The reduction is a number."""
    given: tuple[Any, ...] = options
    blank, reduction, zero_infinity = given + (0, 1, False)[len(given) :]
    lengths = (input_lengths, target_lengths)
    return ctc_loss(draw, log_probs, targets, *lengths, blank, REDUCTIONS[reduction], zero_infinity)


def _overloads(packet: Any) -> list[Callable[..., Any]]:
    return [getattr(packet, name) for name in packet.overloads() if not name.endswith("out")]


OVERLOAD_REPLACEMENTS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    **{
        overload: replacement
        for name, replacement in BUILT_IN.items()
        if hasattr(aten, name)
        for overload in _overloads(getattr(aten, name))
    },
    aten.native_dropout.default: native_dropout,
    aten.ctc_loss.IntList: aten_ctc_loss,
    aten.ctc_loss.Tensor: aten_ctc_loss,
}
