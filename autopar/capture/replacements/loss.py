"""Losses whose shapes PyTorch takes from values."""

# Parameters are named, and pass flags, as those of the torch function do.
# ruff: noqa: FBT001

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.capture.replacements.draw import Draw

Lengths = Tensor | Sequence[int] | int


def ctc_loss(
    draw: Draw,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:
    """F.ctc_loss through `autopar::ctc_loss`."""
    batched = log_probs.dim() == 3
    scores = log_probs if batched else log_probs.unsqueeze(1)
    labels = targets if batched or targets.dim() == 2 else targets.unsqueeze(0)
    lengths = [_lengths(item, log_probs.device) for item in (input_lengths, target_lengths)]
    loss, _ = torch.ops.autopar.ctc_loss(scores, labels, *lengths, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == float("inf"), 0.0, loss)
    if reduction == "mean":
        return (loss / lengths[1].clamp_min(1).to(loss.dtype)).mean()
    if reduction == "sum":
        return loss.sum()
    return loss if batched else loss.squeeze(0)


def _lengths(value: Lengths, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.reshape(-1).to(torch.int64)
    return torch.tensor([value] if isinstance(value, int) else list(value), device=device)


LOSS_REPLACEMENTS: Mapping[Callable[..., Any], Callable[..., Any]] = {F.ctc_loss: ctc_loss}
