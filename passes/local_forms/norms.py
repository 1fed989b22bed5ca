"""Group norm: the batch, channel and group counts among the arguments are this rank's."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue


def group_norm(local: LocalCall) -> LocalValue:
    """(input, weight, bias, N, C, HxW, group, eps)."""
    source, weight, bias, _, _, area, _, eps = local.args
    batch, channels = local.input_chunk(0)[1][:2]
    groups = local.output_chunk(1)[1][1]
    return local.build.op(local.call.target, source, weight, bias, batch, channels, area, groups, eps)


def group_norm_backward(local: LocalCall) -> LocalValue:
    """(grad_out, input, mean, rstd, weight, N, C, HxW, group, mask)."""
    grad, source, mean, rstd, weight, _, _, area, _, mask = local.args
    batch, channels = local.input_chunk(1)[1][:2]
    groups = local.input_chunk(2)[1][1]
    counts = (batch, channels, area, groups)
    return local.build.op(local.call.target, grad, source, mean, rstd, weight, *counts, mask)


FORMS: Mapping[str, LocalForm] = {
    "aten.native_group_norm.default": group_norm,
    "aten.native_group_norm_backward.default": group_norm_backward,
}
