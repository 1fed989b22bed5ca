"""Bags of embeddings, as of large recommender tables: sharded by feature, or by row where bags are summed."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Shard

from autopar.sharding.layout import REPLICATE
from autopar.sharding.op_call import OpCall
from autopar.sharding.rule import Rule
from autopar.sharding.rules.embedding import ROWS
from autopar.sharding.rules.placing import SUM, RuleTable, place

SUM_MODE, MAX_MODE = 0, 2


def embedding_bag(call: OpCall) -> Iterator[Rule]:
    """(weight, indices, offsets, scale_grad_by_freq, mode, ...) -> (out, offset2bag, bag_size, max_indices)."""
    mode = call.argument(4, "mode", SUM_MODE)
    maxima = Shard(1) if mode == MAX_MODE else REPLICATE
    yield place(call, {0: Shard(1)}, (Shard(1), REPLICATE, REPLICATE, maxima))
    if mode == SUM_MODE and call.argument(8, "padding_idx", -1) < 0:
        yield place(call, {0: Shard(0)}, (SUM, REPLICATE, REPLICATE, REPLICATE), form=ROWS)


def embedding_bag_backward(call: OpCall) -> Iterator[Rule]:
    """(grad, indices, offsets, offset2bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode, ...)."""
    mode, is_sparse = call.args[8], call.args[9]
    if is_sparse:
        return
    maxima = Shard(1) if mode == MAX_MODE else REPLICATE
    yield place(call, {0: Shard(1), 5: maxima}, Shard(1))
    if mode != MAX_MODE:
        yield place(call, {}, Shard(0), form=ROWS)
        yield place(call, {0: SUM}, SUM)


RULES: RuleTable = {
    "aten._embedding_bag.default": embedding_bag,
    "aten._embedding_bag_forward_only.default": embedding_bag,
    "aten._embedding_bag_backward.default": embedding_bag_backward,
}
