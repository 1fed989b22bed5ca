"""Matrix products. With the contracted dim sharded, results are partial sums; a bias is then added on one rank only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.sharding.layout import REPLICATE
from autopar.sharding.op_call import OpCall
from autopar.sharding.rule import Rule
from autopar.sharding.rules.placing import SUM, RuleTable, place, required_tensor_at, result

BIAS_ONCE = "bias_once"  # the bias is added where the rank's coordinate on these axes is 0


def biased(call: OpCall) -> Iterator[Rule]:
    """`addmm`, `addmv`, `baddbmm`, ...: bias (broadcast), left, right."""
    shape = result(call).shape
    for dim, size in enumerate(shape):
        if size > 1:
            yield place(call, {0: _bias(call, dim), **_operands(call, dim)}, Shard(dim))
    if dict(call.kwargs).get("alpha", 1) == 1 and dict(call.kwargs).get("beta", 1) == 1:
        left, right = required_tensor_at(call, 1), required_tensor_at(call, 2)
        contracted = {1: Shard(len(left.shape) - 1), 2: Shard(max(0, len(right.shape) - 2))}
        yield place(call, contracted, SUM, form=BIAS_ONCE)


def _bias(call: OpCall, dim: int) -> Placement:
    bias, shape = required_tensor_at(call, 0).shape, result(call).shape
    own = dim - (len(shape) - len(bias))
    return Shard(own) if own >= 0 and bias[own] == shape[dim] else REPLICATE


def _operands(call: OpCall, dim: int) -> dict[Any, Placement]:
    """Placements of the two factors when dim `dim` of the result is cut."""
    left, right = required_tensor_at(call, 1).shape, required_tensor_at(call, 2).shape
    if dim < len(left) - 2:  # a batch dim
        return {1: Shard(dim), 2: Shard(dim)}
    if dim == len(left) - 2:  # rows
        return {1: Shard(dim)}
    return {2: Shard(len(right) - 1)}


def outer_sum(call: OpCall) -> Iterator[Rule]:
    """`addr(bias, rows, columns)`."""
    yield place(call, {0: _bias(call, 0), 1: Shard(0)}, Shard(0))
    yield place(call, {0: _bias(call, 1), 2: Shard(0)}, Shard(1))


RULES: RuleTable = {
    "aten.mm.default": "mk,kn->mn",
    "aten.bmm.default": "bmk,bkn->bmn",
    "aten.mv.default": "mk,k->m",
    "aten.dot.default": "k,k->",
    "aten.vdot.default": "k,k->",
    "aten.addmm.default": biased,
    "aten.addmv.default": biased,
    "aten.baddbmm.default": biased,
    "aten.addr.default": outer_sum,
}
