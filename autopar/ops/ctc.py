"""Connectionist temporal classification with outputs of a shape that the targets' values do not decide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.ops.define import differentiate, fake_of, op

aten = torch.ops.aten
HOW = "Tensor targets, Tensor input_lengths, Tensor target_lengths"


def padded_states(targets: Tensor) -> int:
    """Blanks and labels alternate; no target is longer than `targets`."""
    return 2 * targets.shape[-1] + 1


@op(f"ctc_loss(Tensor log_probs, {HOW}, int blank, bool zero_infinity) -> (Tensor, Tensor)")
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor]:
    """(negative log-likelihood [N], its forward variables [N, T, states]) of log_probs [T, N, C].

    `zero_infinity`: impossible targets, whose loss is infinite, have a gradient of zero.
    """
    times, batch, _ = log_probs.shape
    states = padded_states(targets)
    if batch == 0:
        return log_probs.new_empty((0,)), log_probs.new_empty((0, times, states))
    lengths = (input_lengths.tolist(), target_lengths.tolist())
    loss, alpha = aten._ctc_loss.default(log_probs, targets, *lengths, blank, zero_infinity)
    alpha = F.pad(alpha, (0, states - alpha.shape[2]))
    return loss, alpha.masked_fill_(~_reached(alpha, input_lengths, target_lengths), 0.0)


def _reached(alpha: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> Tensor:
    """Which forward variables exist; ATen leaves the others as they were in memory."""
    _, times, states = alpha.shape
    time = torch.arange(times, device=alpha.device) < input_lengths.to(alpha.device)[:, None]
    state = torch.arange(states, device=alpha.device) < 2 * target_lengths.to(alpha.device)[:, None] + 1
    return time[:, :, None] & state[:, None]


@op(
    f"ctc_loss_backward(Tensor grad, Tensor log_probs, {HOW}, Tensor loss, Tensor alpha, "
    "int blank, bool zero_infinity) -> Tensor"
)
def ctc_loss_backward(grad: Tensor, log_probs: Tensor, targets: Tensor, *rest: Any) -> Tensor:
    """The gradient of log_probs."""
    input_lengths, target_lengths, loss, alpha, blank, zero_infinity = rest
    if log_probs.shape[1] == 0:
        return torch.empty_like(log_probs, memory_format=torch.contiguous_format)
    longest = target_lengths.tolist()
    saved = (input_lengths.tolist(), longest, loss, alpha[..., : 2 * max(longest) + 1].contiguous())
    result = aten._ctc_loss_backward.default(grad, log_probs, targets, *saved, blank, zero_infinity)
    contiguous: Tensor = result.contiguous()
    return contiguous


@fake_of("ctc_loss")
def _(log_probs: Tensor, targets: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    times, batch, _classes = log_probs.shape
    return log_probs.new_empty((batch,)), log_probs.new_empty((batch, times, padded_states(targets)))


@fake_of("ctc_loss_backward")
def _(grad: Tensor, log_probs: Tensor, *_: object) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    how = (ctx.blank, ctx.zero_infinity)
    return torch.ops.autopar.ctc_loss_backward(grad, *ctx.saved_tensors, *how), *(None,) * 5


differentiate("ctc_loss", _backward, _save)
