"""Negative log-likelihood over sharded targets and sharded classes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.passes.local_forms.ranges import clear, shift_into_range
from autopar.sharding.rules.loss import CLASSES, NO_REDUCTION, TARGETS

aten = torch.ops.aten
MEAN_REDUCTION, SUM_REDUCTION = 1, 2
NOWHERE = -100  # a target that no rank counts


def own_targets(local: LocalCall, scores: int, target: fx.Node, ignore_index: int) -> tuple[fx.Node, int]:
    """(targets counted within this rank's classes, the value of those to ignore)."""
    if not local.axes_with(CLASSES):
        return target, ignore_index
    offsets, lengths = local.input_chunk(scores)
    shifted, outside = shift_into_range(local.build, target, offsets[1], lengths[1])
    ignored = local.build.op(aten.eq.Scalar, target, ignore_index)
    return clear(local.build, shifted, local.build.op(aten.bitwise_or.Tensor, outside, ignored), NOWHERE), NOWHERE


def nll_loss_forward(local: LocalCall) -> LocalValue:
    """The local sum over the targets' total weight, which is all-reduced: a mean is over the targets of all ranks."""
    axes = (*local.axes_with(TARGETS), *local.axes_with(CLASSES))
    if not axes:
        return local.plain()
    scores, target, weight, reduction, ignore_index = local.args
    target, ignore_index = own_targets(local, 0, target, ignore_index)
    local_reduction = NO_REDUCTION if reduction == NO_REDUCTION else SUM_REDUCTION
    picked = local.build.op(local.call.target, scores, target, weight, local_reduction, ignore_index)
    loss, total = local.output(picked, 0), local.output(picked, 1)
    if reduction == NO_REDUCTION:
        return loss, total
    for axis in axes:
        total = local.build.all_reduce(total, axis)
    if reduction == MEAN_REDUCTION:
        loss = local.build.op(aten.div.Tensor, loss, total)
    return loss, total


def nll_loss_backward(local: LocalCall) -> LocalValue:
    """The plain op, on the targets that fall into this rank's classes."""
    grad, scores, target, weight, reduction, ignore_index, total = local.args
    target, ignore_index = own_targets(local, 1, target, ignore_index)
    return local.build.op(local.call.target, grad, scores, target, weight, reduction, ignore_index, total)


FORMS: Mapping[str, LocalForm] = {
    "aten.nll_loss_forward.default": nll_loss_forward,
    "aten.nll_loss2d_forward.default": nll_loss_forward,
    "aten.nll_loss_backward.default": nll_loss_backward,
    "aten.nll_loss2d_backward.default": nll_loss_backward,
}
