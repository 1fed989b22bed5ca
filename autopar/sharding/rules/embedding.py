"""Embeddings: sharded by batch, by feature, or by vocabulary (masked lookups that sum to the whole)."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Shard

from autopar.sharding.op_call import OpCall
from autopar.sharding.rule import Rule
from autopar.sharding.rules.placing import SUM, RuleTable, long_dims, place, required_tensor_at, result, summable

ROWS = "rows"  # the table's rows are sharded; an index outside a rank's range finds zeros there


def embedding(call: OpCall) -> Iterator[Rule]:
    """(weight, indices, padding_idx, ...)."""
    for dim in long_dims(required_tensor_at(call, 1)):
        yield place(call, {1: Shard(dim)}, Shard(dim))
    yield place(call, {0: Shard(1)}, Shard(len(result(call).shape) - 1))
    yield place(call, {0: Shard(0)}, SUM, form=ROWS)


def embedding_dense_backward(call: OpCall) -> Iterator[Rule]:
    """(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)."""
    by_frequency = bool(call.args[4])
    yield place(call, {0: Shard(len(required_tensor_at(call, 0).shape) - 1)}, Shard(1))
    yield place(call, {}, Shard(0), form=ROWS)
    if summable(result(call)):
        yield place(call, {0: SUM}, SUM)
    if by_frequency:  # counts of indices must be those of the whole batch
        return
    for dim in long_dims(required_tensor_at(call, 1)):
        yield place(call, {0: Shard(dim), 1: Shard(dim)}, SUM)


RULES: RuleTable = {
    "aten.embedding.default": embedding,
    "aten.embedding_dense_backward.default": embedding_dense_backward,
}
