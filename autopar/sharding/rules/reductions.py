"""Reductions: kept dims stay sharded; a reduced dim that is sharded gives partial sums, maxima or minima."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.distributed.tensor import Partial, Shard

from autopar.sharding.op_call import OpCall
from autopar.sharding.rule import Rule
from autopar.sharding.rules.placing import (
    MAX,
    MIN,
    SUM,
    RuleTable,
    names,
    place,
    result,
    summable,
    wrap_dim,
    wrap_dims,
)
from autopar.sharding.rules.views import keep_dims, passing_sums

MEAN = "mean"  # the local mean times the share of the elements that lie here
PREFIX = "prefix"  # the totals of earlier ranks are added


def kept_dims(rank: int, reduced: tuple[int, ...], *, keepdim: bool) -> Iterator[tuple[int, int]]:
    """(dim of the input, dim of the result) of the dims that are not reduced."""
    kept = [dim for dim in range(rank) if dim not in reduced]
    return ((dim, dim if keepdim else position) for position, dim in enumerate(kept))


def reduction(
    call: OpCall, reduced: tuple[int, ...], *, keepdim: bool, partial: Partial | None, form: str = ""
) -> Iterator[Rule]:
    """Rules of a reduction over `reduced`; `partial` is None where the reduced dims must be whole."""
    shape = call.inputs[0].shape
    for source, target in kept_dims(len(shape), reduced, keepdim=keepdim):
        if shape[source] > 1:
            yield place(call, {0: Shard(source)}, Shard(target))
    if partial is None or not all(map(summable, call.outputs)):
        return
    for dim in reduced:
        if shape[dim] > 1:
            yield place(call, {0: Shard(dim)}, partial, form=form)


def _is_linear(call: OpCall) -> bool:
    return call.name.startswith(("aten.sum.", "aten.mean."))


def over_dims(partial: Partial | None, form: str = "", position: int = 1) -> Callable[[OpCall], Iterator[Rule]]:
    """Rules of `op(self, ..., dim, keepdim)` with `dim` at `position`: one dim, several, or None for all."""

    def rules(call: OpCall) -> Iterator[Rule]:
        reduced = wrap_dims(call.argument(position, "dim", None), len(call.inputs[0].shape))
        keepdim = bool(call.argument(position + 1, "keepdim", False))
        yield from reduction(call, reduced, keepdim=keepdim, partial=partial, form=form)
        if _is_linear(call):
            yield from passing_sums(call)

    return rules


def over_all(partial: Partial | None, form: str = "") -> Callable[[OpCall], Iterator[Rule]]:
    """Rules of a reduction of the whole tensor to a scalar."""

    def rules(call: OpCall) -> Iterator[Rule]:
        everything = tuple(range(len(call.inputs[0].shape)))
        yield from reduction(call, everything, keepdim=False, partial=partial, form=form)
        if _is_linear(call):
            yield from passing_sums(call)

    return rules


def one_dim(call: OpCall) -> Iterator[Rule]:
    """`op(self, dim, keepdim)` with one dim, which must be whole: argmax, max with indices, ..."""
    rank = len(call.inputs[0].shape)
    dim = call.argument(1, "dim", None)
    if dim is not None and rank:
        keepdim = bool(call.argument(2, "keepdim", False))
        yield from reduction(call, (wrap_dim(dim, rank),), keepdim=keepdim, partial=None)


def along(call: OpCall) -> Iterator[Rule]:
    """`op(self, dim, ...)` along one dim, of the same shape: cumsum, sort, ...; the other dims may be sharded."""
    dim = call.argument(1, "dim", -1)
    return _without_sums(keep_dims(call, (dim,)))


def running_sum(call: OpCall) -> Iterator[Rule]:
    """`cumsum`: as `along`, partial sums pass, and the dim itself may be sharded."""
    shape = result(call).shape
    yield from keep_dims(call, (call.args[1],) if shape else ())
    dim = wrap_dim(call.args[1], len(shape))
    if shape and shape[dim] > 1 and summable(result(call)):
        row_bytes = result(call).nbytes // shape[dim]
        yield place(call, {0: Shard(dim)}, Shard(dim), form=PREFIX, internal_bytes=2 * row_bytes)


def extremes(call: OpCall) -> Iterator[Rule]:
    """`aminmax(self, *, dim, keepdim)`."""
    options, rank = dict(call.kwargs), len(call.inputs[0].shape)
    reduced = wrap_dims(options.get("dim"), rank)
    for rule in reduction(call, reduced, keepdim=bool(options.get("keepdim", False)), partial=SUM):
        yield Rule(rule.inputs, (MIN, MAX)) if rule.outputs[0] == SUM else rule


def nth_value(call: OpCall) -> Iterator[Rule]:
    """`kthvalue(self, k, dim, keepdim)`: the dim must be whole."""
    rank = len(call.inputs[0].shape)
    if rank:
        reduced = (wrap_dim(call.argument(2, "dim", -1), rank),)
        yield from reduction(call, reduced, keepdim=bool(call.argument(3, "keepdim", False)), partial=None)


def _without_sums(rules: Iterator[Rule]) -> Iterator[Rule]:
    return (rule for rule in rules if SUM not in rule.outputs)


def sort(call: OpCall) -> Iterator[Rule]:
    """`sort(self, dim, descending)`."""
    return along(call)


def stable_sort(call: OpCall) -> Iterator[Rule]:
    """`sort.stable(self, *, stable, dim, descending)`."""
    dim = dict(call.kwargs).get("dim", -1)
    return _without_sums(keep_dims(call, (dim,)))


def top_values(call: OpCall) -> Iterator[Rule]:
    """`topk(self, k, dim)`, `kthvalue` keeps no dim."""
    return _without_sums(keep_dims(call, (call.argument(2, "dim", -1),)))


RULES: RuleTable = {
    "aten.sum.dim_IntList": over_dims(SUM),
    "aten.sum.default": over_all(SUM),
    "aten.nansum.default": over_dims(SUM),
    "aten.mean.dim": over_dims(SUM, MEAN),
    "aten.mean.default": over_all(SUM, MEAN),
    "aten.amax.default": over_dims(MAX),
    "aten.amin.default": over_dims(MIN),
    "aten.max.default": over_all(MAX),
    "aten.min.default": over_all(MIN),
    "aten.count_nonzero.dim_IntList": over_dims(SUM),
    "aten.count_nonzero.default": over_dims(SUM),
    **dict.fromkeys(
        names("""
            aten.argmax.default aten.argmin.default aten.max.dim aten.min.dim aten.median.dim aten.nanmedian.dim
            aten.mode.default
        """),
        one_dim,
    ),
    **dict.fromkeys(
        names("""
            aten.cumprod.default aten.cummax.default aten.cummin.default aten.logcumsumexp.default
        """),
        along,
    ),
    "aten.cumsum.default": running_sum,
    "aten.aminmax.default": extremes,
    "aten.kthvalue.default": nth_value,
    "aten.sort.default": sort,
    "aten.sort.stable": stable_sort,
    "aten.topk.default": top_values,
}
