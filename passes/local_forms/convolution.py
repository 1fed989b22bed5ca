"""Convolutions: groups and bias sizes are this rank's; over sharded input channels the bias is added once."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.passes.local_forms.matmul import holds_bias
from autopar.sharding.rules.convolution import GROUPS


def own_groups(local: LocalCall, groups: int) -> int:
    """The number of groups that this rank computes."""
    for axis in local.axes_with(GROUPS):
        groups //= local.geometry.mesh_shape[axis]
    return groups


def convolution(local: LocalCall) -> LocalValue:
    """(input, weight, bias, ..., groups)."""
    source, weight, bias, *window, groups = local.args
    bias = bias if holds_bias(local) else None
    return local.build.op(local.call.target, source, weight, bias, *window, own_groups(local, groups))


def convolution_backward(local: LocalCall) -> LocalValue:
    """(grad, input, weight, bias_sizes, ..., groups, mask)."""
    grad, source, weight, bias_sizes, *window, groups, mask = local.args
    if bias_sizes is not None:
        bias_sizes = [local.input_chunk(0)[1][1]]
    groups = own_groups(local, groups)
    return local.build.op(local.call.target, grad, source, weight, bias_sizes, *window, groups, mask)


FORMS: Mapping[str, LocalForm] = {
    "aten.convolution.default": convolution,
    "aten.convolution_backward.default": convolution_backward,
}
