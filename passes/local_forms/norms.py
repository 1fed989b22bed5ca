"""Group norm: the batch, channel and group counts among the arguments are this rank's; over sharded space, sums are
all-reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.passes.local_forms.layer_norm import inverse_root, outputs_in_their_dtypes
from autopar.passes.local_forms.precision import widened
from autopar.sharding.rules.norms import MOMENTS

aten = torch.ops.aten


@dataclass(frozen=True)
class Groups:
    """The groups of this rank's part of a tensor whose channels are divided into groups."""

    local: LocalCall
    batch: int
    channels: int
    groups: int
    rank: int
    count: int  # elements of a group in the whole tensor

    def sums(self, value: fx.Node) -> fx.Node:
        """Sums over the channels of a group and over all of space, [batch, groups]."""
        build = self.local.build
        by_channel = self.over(value, range(2, self.rank)) if self.rank > 2 else value
        grouped = build.op(aten.view.default, by_channel, [self.batch, self.groups, self.channels // self.groups])
        total = self.over(grouped, [2])
        for axis in self.local.axes_with(MOMENTS):
            total = build.all_reduce(total, axis)
        return total

    def means(self, value: fx.Node) -> fx.Node:
        return self.local.build.op(aten.div.Scalar, self.sums(value), self.count)

    def over(self, value: fx.Node, dims: Sequence[int]) -> fx.Node:
        """Sums over dims of what this rank holds."""
        return self.local.build.op(aten.sum.dim_IntList, value, list(dims))

    def spread(self, statistic: fx.Node) -> fx.Node:
        """[batch, groups] in the shape that broadcasts to the input."""
        build, each = self.local.build, self.channels // self.groups
        wide = build.op(aten.unsqueeze.default, widened(self.local, statistic), 2)
        wide = build.op(aten.expand.default, wide, [self.batch, self.groups, each])
        wide = build.op(aten.clone.default, wide, memory_format=torch.contiguous_format)
        return build.op(aten.view.default, wide, [self.batch, self.channels, *(1,) * (self.rank - 2)])

    def by_channel(self, weight: fx.Node) -> fx.Node:
        """[channels] in the shape that broadcasts to the input."""
        shape = [self.channels, *(1,) * (self.rank - 2)]
        return self.local.build.op(aten.view.default, widened(self.local, weight), shape)


def groups_of(local: LocalCall, source: int, per_group: tuple[int, ...]) -> Groups:
    """`source`: the number of the input among the tensors; `per_group`: this rank's [batch, groups]."""
    whole, (batch, channels, *_) = local.call.inputs[source].shape, local.input_chunk(source)[1]
    groups = local.call.args[6 if source == 0 else 8]
    return Groups(local, batch, channels, per_group[1], len(whole), prod(whole[1:]) // groups)


def group_norm(local: LocalCall) -> LocalValue:
    """(input, weight, bias, N, C, HxW, group, eps) -> (out, mean, rstd)."""
    source, weight, bias, _, _, area, _, eps = local.args
    own = groups_of(local, 0, local.output_chunk(1)[1])
    if not local.axes_with(MOMENTS):
        counts = (own.batch, own.channels, area, own.groups)
        return local.build.op(local.call.target, source, weight, bias, *counts, eps)
    build, source = local.build, widened(local, source)
    mean = own.means(source)
    deviations = build.op(aten.sub.Tensor, source, own.spread(mean))
    rstd = inverse_root(local, own.means(build.op(aten.mul.Tensor, deviations, deviations)), eps)
    out = build.op(aten.mul.Tensor, deviations, own.spread(rstd))
    if weight is not None:
        out = build.op(aten.mul.Tensor, out, own.by_channel(weight))
    if bias is not None:
        out = build.op(aten.add.Tensor, out, own.by_channel(bias))
    return outputs_in_their_dtypes(local, out, mean, rstd)


def group_norm_backward(local: LocalCall) -> LocalValue:
    """(grad_out, input, mean, rstd, weight, N, C, HxW, group, mask): as layer norm's, over groups.

    rstd * (g - mean(g) - normal * mean(g * normal)) with g = grad * weight, and the gradients of weight and bias.
    """
    grad, source, mean, rstd, weight, _, _, area, _, mask = local.args
    own = groups_of(local, 1, local.input_chunk(2)[1])
    if not local.axes_with(MOMENTS):
        counts = (own.batch, own.channels, area, own.groups)
        return local.build.op(local.call.target, grad, source, mean, rstd, weight, *counts, mask)
    build, grad, slope = local.build, widened(local, grad), own.spread(rstd)
    normal = build.op(aten.mul.Tensor, build.op(aten.sub.Tensor, widened(local, source), own.spread(mean)), slope)
    weighted = grad if weight is None else build.op(aten.mul.Tensor, grad, own.by_channel(weight))
    along = build.op(aten.mul.Tensor, normal, own.spread(own.means(build.op(aten.mul.Tensor, weighted, normal))))
    rest = build.op(aten.sub.Tensor, build.op(aten.sub.Tensor, weighted, own.spread(own.means(weighted))), along)
    others = [0, *range(2, own.rank)]
    of_weight = own.over(build.op(aten.mul.Tensor, grad, normal), others) if mask[1] else None
    of_bias = own.over(grad, others) if mask[2] else None
    return outputs_in_their_dtypes(local, build.op(aten.mul.Tensor, rest, slope), of_weight, of_bias)


FORMS: Mapping[str, LocalForm] = {
    "aten.native_group_norm.default": group_norm,
    "aten.native_group_norm_backward.default": group_norm_backward,
}
