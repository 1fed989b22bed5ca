"""Softmax and its relatives: any dim may be sharded, the normalized one too (the form all-reduces maxima and sums)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.distributed.tensor import Shard

from autopar.sharding.op_call import OpCall
from autopar.sharding.rule import Rule
from autopar.sharding.rules.placing import RuleTable, long_dims, result, wrap_dim

NORMALIZED = "normalized"  # the normalized dim is sharded


def along_dim(position: int, reductions: int) -> Callable[[OpCall], Iterator[Rule]]:
    """Rules of an op along the dim at argument `position` whose form all-reduces `reductions` values per row."""

    def rules(call: OpCall) -> Iterator[Rule]:
        out = result(call)
        normalized = wrap_dim(call.args[position], len(out.shape))
        for dim in long_dims(out):
            inputs = (Shard(dim),) * len(call.inputs)
            if dim != normalized:
                yield Rule(inputs, (Shard(dim),))
                continue
            row_bytes = out.nbytes // out.shape[dim]
            yield Rule(inputs, (Shard(dim),), form=NORMALIZED, internal_bytes=reductions * row_bytes)

    return rules


RULES: RuleTable = {
    "aten._softmax.default": along_dim(1, 2),
    "aten._safe_softmax.default": along_dim(1, 2),
    "aten._log_softmax.default": along_dim(1, 2),
    "aten._softmax_backward_data.default": along_dim(2, 1),
    "aten._log_softmax_backward_data.default": along_dim(2, 1),
}
