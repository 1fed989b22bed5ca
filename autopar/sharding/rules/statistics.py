"""Reductions that no single sum or maximum expresses: over a sharded dim, their form all-reduces."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.distributed.tensor import Shard

from autopar.sharding.layout import REPLICATE
from autopar.sharding.op_call import OpCall
from autopar.sharding.rule import Rule
from autopar.sharding.rules.placing import RuleTable, place, result, wrap_dims
from autopar.sharding.rules.reductions import kept_dims

ALL_REDUCED = "all_reduced"  # a reduced dim is sharded


def statistic(call: OpCall, reduced: tuple[int, ...], *, keepdim: bool, rounds: int) -> Iterator[Rule]:
    """Kept dims stay sharded; over sharded reduced dims, `rounds` values per result are all-reduced."""
    shape = call.inputs[0].shape
    for source, target in kept_dims(len(shape), reduced, keepdim=keepdim):
        if shape[source] > 1:
            yield place(call, {0: Shard(source)}, Shard(target))
    for dim in reduced:
        if shape[dim] > 1 and not call.inputs[0].dtype.is_complex:
            yield place(call, {0: Shard(dim)}, REPLICATE, form=ALL_REDUCED, internal_bytes=rounds * result(call).nbytes)


def over_dims(rounds: int, position: int = 1) -> Callable[[OpCall], Iterator[Rule]]:
    """Rules of `op(self, ..., dim, keepdim)`, with `dim` at `position`."""

    def rules(call: OpCall) -> Iterator[Rule]:
        reduced = wrap_dims(call.argument(position, "dim"), len(call.inputs[0].shape))
        keepdim = bool(call.argument(position + 1, "keepdim", False))
        yield from statistic(call, reduced, keepdim=keepdim, rounds=rounds)

    return rules


def vector_norm(call: OpCall) -> Iterator[Rule]:
    """`linalg_vector_norm(self, ord, dim, keepdim)`, `norm(self, p, dim, keepdim)`."""
    return over_dims(1, position=2)(call)


def variance(call: OpCall) -> Iterator[Rule]:
    """`var`, `std`, `var_mean`, `std_mean` (self, dim, *, correction, keepdim)."""
    reduced = wrap_dims(call.argument(1, "dim"), len(call.inputs[0].shape))
    keepdim = bool(dict(call.kwargs).get("keepdim", False))
    return statistic(call, reduced, keepdim=keepdim, rounds=2)


def truth(call: OpCall) -> Iterator[Rule]:
    """`any`, `all` of a bool result (that of uint8 is uint8)."""
    if str(result(call).dtype) == "torch.bool":
        yield from over_dims(4)(call)


RULES: RuleTable = {
    "aten.prod.default": over_dims(1),
    "aten.prod.dim_int": over_dims(1),
    "aten.norm.Scalar": vector_norm,
    "aten.norm.ScalarOpt_dim": vector_norm,
    "aten.logsumexp.default": over_dims(2),
    "aten.linalg_vector_norm.default": vector_norm,
    **{f"aten.{name}.correction": variance for name in ("var", "std", "var_mean", "std_mean")},
    **{f"aten.{name}.{overload}": truth for name in ("any", "all") for overload in ("default", "dim", "dims")},
}
