"""Softmax whose normalized dim is sharded: maxima and sums are all-reduced, the scores stay where they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.passes.local_forms.precision import converted, output_dtype, widened
from autopar.passes.local_forms.ranges import clear
from autopar.sharding.rules.softmax import NORMALIZED

aten = torch.ops.aten


def reduced(local: LocalCall, node: fx.Node, dim: int, reduce_op: str) -> fx.Node:
    """The sum or maximum over the whole normalized dim."""
    reduction = {"sum": aten.sum.dim_IntList, "max": aten.amax.default}[reduce_op]
    value = local.build.op(reduction, node, [dim], True)
    for axis in local.axes_with(NORMALIZED):
        value = local.build.all_reduce(value, axis, reduce_op)
    return value


def softmax(local: LocalCall) -> LocalValue:
    """exp(x - max) / sum."""
    if not local.axes_with(NORMALIZED):
        return local.plain()
    build, dim = local.build, local.args[1]
    scores = widened(local, converted(local, local.args[0], output_dtype(local)))
    powers = build.op(aten.exp.default, build.op(aten.sub.Tensor, scores, reduced(local, scores, dim, "max")))
    ratio = build.op(aten.div.Tensor, powers, reduced(local, powers, dim, "sum"))
    return converted(local, ratio, output_dtype(local))


def safe_softmax(local: LocalCall) -> LocalValue:
    """As softmax; a row of minus infinities gives zeros."""
    if not local.axes_with(NORMALIZED):
        return local.plain()
    build, dim = local.build, local.args[1]
    scores = widened(local, converted(local, local.args[0], output_dtype(local)))
    top = reduced(local, scores, dim, "max")
    empty = build.op(aten.eq.Scalar, top, float("-inf"))
    powers = build.op(aten.exp.default, build.op(aten.sub.Tensor, scores, clear(build, top, empty)))
    total = clear(build, reduced(local, powers, dim, "sum"), empty, 1)
    return converted(local, build.op(aten.div.Tensor, powers, total), output_dtype(local))


def log_softmax(local: LocalCall) -> LocalValue:
    """x - max - log(sum of exp(x - max))."""
    if not local.axes_with(NORMALIZED):
        return local.plain()
    build, dim = local.build, local.args[1]
    scores = widened(local, converted(local, local.args[0], output_dtype(local)))
    shifted = build.op(aten.sub.Tensor, scores, reduced(local, scores, dim, "max"))
    total = reduced(local, build.op(aten.exp.default, shifted), dim, "sum")
    result = build.op(aten.sub.Tensor, shifted, build.op(aten.log.default, total))
    return converted(local, result, output_dtype(local))


def softmax_backward(local: LocalCall) -> LocalValue:
    """(grad - sum(grad * output)) * output."""
    if not local.axes_with(NORMALIZED):
        return local.plain()
    build, dim = local.build, local.args[2]
    grad, output = (widened(local, node) for node in local.args[:2])
    weighted = reduced(local, build.op(aten.mul.Tensor, grad, output), dim, "sum")
    result = build.op(aten.mul.Tensor, build.op(aten.sub.Tensor, grad, weighted), output)
    return converted(local, result, output_dtype(local))


def log_softmax_backward(local: LocalCall) -> LocalValue:
    """grad - exp(output) * sum(grad)."""
    if not local.axes_with(NORMALIZED):
        return local.plain()
    build, dim = local.build, local.args[2]
    grad, output = (widened(local, node) for node in local.args[:2])
    total = reduced(local, grad, dim, "sum")
    spread = build.op(aten.mul.Tensor, build.op(aten.exp.default, output), total)
    return converted(local, build.op(aten.sub.Tensor, grad, spread), output_dtype(local))


FORMS: Mapping[str, LocalForm] = {
    "aten._softmax.default": softmax,
    "aten._safe_softmax.default": safe_softmax,
    "aten._log_softmax.default": log_softmax,
    "aten._softmax_backward_data.default": softmax_backward,
    "aten._log_softmax_backward_data.default": log_softmax_backward,
}
