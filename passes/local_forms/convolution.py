"""Convolutions: groups and bias sizes are this rank's; over sharded input channels the bias is added once.

Over sharded space, the call reads this rank's inputs with their halo, in which the padding of the op is zeros already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autopar.passes.halos import Halos
from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.passes.local_forms.matmul import holds_bias
from autopar.sharding.rules.convolution import GROUPS
from autopar.sharding.rules.spatial import each

aten = torch.ops.aten


def own_groups(local: LocalCall, groups: int) -> int:
    """The number of groups that this rank computes."""
    for axis in local.axes_with(GROUPS):
        groups //= local.geometry.mesh_shape[axis]
    return groups


def own_window(halos: Halos, window: Sequence[Sequence[int] | bool], spatial: int) -> list[Sequence[int] | bool]:
    """(stride, padding, dilation, transposed, output_padding) of this rank's call."""
    stride, padding, dilation, transposed, output_padding = window
    paddings, ends = list(each(padding, spatial)), list(each(output_padding, spatial))
    for cut in halos.cuts:
        paddings[cut.dim - 2], ends[cut.dim - 2] = cut.frame.padding
    return [stride, paddings, dilation, transposed, ends]


def convolution(local: LocalCall) -> LocalValue:
    """(input, weight, bias, ..., groups)."""
    source, weight, bias, *window, groups = local.args
    halos, spatial = Halos(local), len(local.call.inputs[1].shape) - 2
    bias = bias if holds_bias(local) else None
    window = own_window(halos, window, spatial)
    args = halos.fetched(source), weight, bias, *window, own_groups(local, groups)
    return halos.kept(local.build.op(local.call.target, *args))


def convolution_backward(local: LocalCall) -> LocalValue:
    """(grad, input, weight, bias_sizes, ..., groups, mask)."""
    grad, source, weight, bias_sizes, *window, groups, mask = local.args
    halos, spatial = Halos(local), len(local.call.inputs[2].shape) - 2
    if bias_sizes is not None:
        bias_sizes = [local.input_chunk(0)[1][1]]
    how = (bias_sizes, *own_window(halos, window, spatial), own_groups(local, groups), mask)
    node = local.build.op(local.call.target, halos.widened(grad), halos.fetched(source), weight, *how)
    if not (halos and mask[0]):
        return node
    of_input, *others = (local.output(node, index) if wanted else None for index, wanted in enumerate(mask))
    assert of_input is not None
    return (halos.returned(of_input), *others)


FORMS: Mapping[str, LocalForm] = {
    "aten.convolution.default": convolution,
    "aten.convolution_backward.default": convolution_backward,
}
