"""Layer norm and RMS norm whose normalized dims are sharded: the sums over them are all-reduced."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import fx

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.passes.local_forms.precision import converted, widened
from autopar.sharding.rules.norms import MOMENTS

aten = torch.ops.aten


def mean(local: LocalCall, value: fx.Node, sizes: tuple[int, ...]) -> fx.Node:
    """The mean over the normalized dims of the whole tensor, dims kept."""
    dims = list(range(-len(sizes), 0))
    total = local.build.op(aten.sum.dim_IntList, value, dims, True)
    for axis in local.axes_with(MOMENTS):
        total = local.build.all_reduce(total, axis)
    return local.build.op(aten.div.Scalar, total, prod(sizes))


def inverse_root(local: LocalCall, value: fx.Node, eps: float) -> fx.Node:
    return local.build.op(aten.rsqrt.default, local.build.op(aten.add.Scalar, value, eps))


def product(local: LocalCall, left: fx.Node, right: fx.Node | None) -> fx.Node:
    """`left * right` in the wider dtype; `left` where there is no `right`."""
    return left if right is None else local.build.op(aten.mul.Tensor, left, widened(local, right))


def outputs_in_their_dtypes(local: LocalCall, *nodes: fx.Node | None) -> tuple[fx.Node | None, ...]:
    """Each output as the op would have returned it; None where it is not computed."""
    pairs = zip(nodes, local.call.outputs, strict=True)
    return tuple(None if node is None or spec is None else converted(local, node, spec.dtype) for node, spec in pairs)


def layer_norm(local: LocalCall) -> LocalValue:
    """(input, normalized_shape, weight, bias, eps) -> (out, mean, rstd)."""
    if not local.axes_with(MOMENTS):
        return local.plain()
    source, sizes, weight, bias, eps = local.args
    build, source = local.build, widened(local, source)
    center = mean(local, source, sizes)
    deviations = build.op(aten.sub.Tensor, source, center)
    rstd = inverse_root(local, mean(local, build.op(aten.mul.Tensor, deviations, deviations), sizes), eps)
    out = product(local, build.op(aten.mul.Tensor, deviations, rstd), weight)
    if bias is not None:
        out = build.op(aten.add.Tensor, out, widened(local, bias))
    return outputs_in_their_dtypes(local, out, center, rstd)


def rms_norm(local: LocalCall) -> LocalValue:
    """(input, normalized_shape, weight, eps) -> (out, rstd)."""
    if not local.axes_with(MOMENTS):
        return local.plain()
    source, sizes, weight, eps = local.args
    build, source = local.build, widened(local, source)
    rstd = inverse_root(local, mean(local, build.op(aten.mul.Tensor, source, source), sizes), eps)
    out = product(local, build.op(aten.mul.Tensor, source, rstd), weight)
    return outputs_in_their_dtypes(local, out, rstd)


def leading_sum(local: LocalCall, value: fx.Node, sizes: tuple[int, ...]) -> fx.Node:
    """The sum over the dims that are not normalized, of which a rank holds its part."""
    leading = list(range(value.meta["val"].dim() - len(sizes)))
    return local.build.op(aten.sum.dim_IntList, value, leading) if leading else value


def layer_norm_backward(local: LocalCall) -> LocalValue:
    """rstd * (g - mean(g) - normal * mean(g * normal)) with g = grad * weight, and the gradients of weight and bias."""
    if not local.axes_with(MOMENTS):
        return local.plain()
    grad, source, sizes, center, rstd, weight, _, _ = local.args
    build, grad = local.build, widened(local, grad)
    deviations = build.op(aten.sub.Tensor, widened(local, source), center)
    normal = build.op(aten.mul.Tensor, deviations, rstd)
    weighted = product(local, grad, weight)
    along = product(local, normal, mean(local, build.op(aten.mul.Tensor, weighted, normal), sizes))
    rest = build.op(aten.sub.Tensor, build.op(aten.sub.Tensor, weighted, mean(local, weighted, sizes)), along)
    of_weight = leading_sum(local, build.op(aten.mul.Tensor, grad, normal), sizes)
    of_input = build.op(aten.mul.Tensor, rest, rstd)
    return outputs_in_their_dtypes(local, of_input, of_weight, leading_sum(local, grad, sizes))


def rms_norm_backward(local: LocalCall) -> LocalValue:
    """rstd * (g - normal * mean(g * normal)) with g = grad * weight, and the gradient of weight."""
    if not local.axes_with(MOMENTS):
        return local.plain()
    grad, source, sizes, rstd, weight, _ = local.args
    build, grad = local.build, widened(local, grad)
    normal = build.op(aten.mul.Tensor, widened(local, source), rstd)
    weighted = product(local, grad, weight)
    along = product(local, normal, mean(local, build.op(aten.mul.Tensor, weighted, normal), sizes))
    of_input = build.op(aten.mul.Tensor, build.op(aten.sub.Tensor, weighted, along), rstd)
    of_weight = leading_sum(local, build.op(aten.mul.Tensor, grad, normal), sizes)
    return outputs_in_their_dtypes(local, of_input, of_weight)


FORMS: Mapping[str, LocalForm] = {
    "aten.native_layer_norm.default": layer_norm,
    "aten.native_layer_norm_backward.default": layer_norm_backward,
    "aten._fused_rms_norm.default": rms_norm,
    "aten._fused_rms_norm_backward.default": rms_norm_backward,
}
