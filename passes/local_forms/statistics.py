"""Statistics over sharded dims, by all-reduces of what every rank has reduced."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, prod
from typing import Any

import torch
from torch import fx

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.passes.local_forms.precision import converted, output_dtype, widened
from autopar.passes.local_forms.ranges import clear
from autopar.sharding.rules.placing import wrap_dims
from autopar.sharding.rules.statistics import ALL_REDUCED

aten = torch.ops.aten


def all_reduced(local: LocalCall, node: fx.Node, reduce_op: str) -> fx.Node:
    """All-reduced over the axes that cut a reduced dim."""
    for axis in local.axes_with(ALL_REDUCED):
        node = local.build.all_reduce(node, axis, reduce_op)
    return node


def logsumexp(local: LocalCall) -> LocalValue:
    """log(sum of exp(local result - max)) + max; infinite maxima are not subtracted."""
    if not local.axes_with(ALL_REDUCED):
        return local.plain()
    build = local.build
    own = build.op(aten.logsumexp.default, widened(local, local.args[0]), *local.args[1:], **local.kwargs)
    top = all_reduced(local, own, "max")
    top = clear(build, top, build.op(aten.isinf.default, top))
    powers = build.op(aten.exp.default, build.op(aten.sub.Tensor, own, top))
    total = build.op(aten.log.default, all_reduced(local, powers, "sum"))
    return converted(local, build.op(aten.add.Tensor, total, top), output_dtype(local))


def vector_norm(local: LocalCall) -> LocalValue:
    """The norm of the ranks' norms."""
    if not local.axes_with(ALL_REDUCED):
        return local.plain()
    build, given = local.build, local.call.argument(1, "ord")
    order = 2.0 if given is None else float(given)
    source = widened(local, converted(local, local.args[0], output_dtype(local)))
    norm = build.op(local.call.target, source, *local.args[1:])
    if order in (inf, -inf):
        norm = all_reduced(local, norm, "max" if order > 0 else "min")
    elif order in (0, 1):
        norm = all_reduced(local, norm, "sum")
    else:
        total = all_reduced(local, build.op(aten.pow.Tensor_Scalar, norm, order), "sum")
        norm = build.op(aten.pow.Tensor_Scalar, total, 1 / order)
    return converted(local, norm, output_dtype(local))


def product(local: LocalCall) -> LocalValue:
    """The product of the ranks' products."""
    return all_reduced(local, local.plain(), "product")


def moments(local: LocalCall, source: fx.Node, dims: list[int]) -> tuple[fx.Node, fx.Node]:
    """(mean, sum of squared deviations) over `dims` of the whole tensor, dims kept."""
    build = local.build
    count = prod(local.call.inputs[0].shape[dim] for dim in dims)
    mean = build.op(
        aten.div.Scalar, all_reduced(local, build.op(aten.sum.dim_IntList, source, dims, True), "sum"), count
    )
    deviations = build.op(aten.sub.Tensor, source, mean)
    squares = build.op(aten.sum.dim_IntList, build.op(aten.mul.Tensor, deviations, deviations), dims, True)
    return mean, all_reduced(local, squares, "sum")


def variance(local: LocalCall) -> LocalValue:
    """`var`, `std`, `var_mean`, `std_mean`, by the op's name."""
    if not local.axes_with(ALL_REDUCED):
        return local.plain()
    build, shape = local.build, local.call.inputs[0].shape
    dims = list(wrap_dims(local.call.argument(1, "dim"), len(shape)))
    mean, squares = moments(local, widened(local, local.args[0]), dims)
    value = build.op(aten.div.Scalar, squares, _degrees_of_freedom(local, prod(shape[dim] for dim in dims)))
    if ".std" in local.call.name:
        value = build.op(aten.sqrt.default, value)
    size = list(local.output_chunk()[1])
    results = tuple(
        converted(local, build.op(aten.view.default, node, size), output_dtype(local)) for node in (value, mean)
    )
    return results if "_mean" in local.call.name else results[0]


def _degrees_of_freedom(local: LocalCall, count: int) -> float:
    correction: Any = local.kwargs.get("correction")
    return max(0.0, count - (1 if correction is None else correction))


def truth(local: LocalCall) -> LocalValue:
    """`any` is the maximum, `all` the minimum of the ranks' answers, in a dtype that every backend reduces."""
    answer = local.plain()
    if not local.axes_with(ALL_REDUCED):
        return answer
    number = local.build.op(aten._to_copy.default, answer, dtype=torch.int32)
    total = all_reduced(local, number, "max" if ".any." in local.call.name else "min")
    return local.build.op(aten._to_copy.default, total, dtype=torch.bool)


FORMS: Mapping[str, LocalForm] = {
    "aten.prod.default": product,
    "aten.prod.dim_int": product,
    "aten.norm.Scalar": vector_norm,
    "aten.norm.ScalarOpt_dim": vector_norm,
    "aten.logsumexp.default": logsumexp,
    "aten.linalg_vector_norm.default": vector_norm,
    **{f"aten.{name}.correction": variance for name in ("var", "std", "var_mean", "std_mean")},
    **{f"aten.{name}.{overload}": truth for name in ("any", "all") for overload in ("default", "dim", "dims")},
}
