"""Negative log-likelihood: the batch or the classes may be sharded; the mean is over the targets of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.sharding.layout import REPLICATE
from autopar.sharding.op_call import OpCall
from autopar.sharding.rule import Rule
from autopar.sharding.rules.placing import SUM, RuleTable, long_dims, place, required_tensor_at

TARGETS = "targets"  # samples (or pixels) are sharded
CLASSES = "classes"  # the classes are sharded; a rank sees the targets that fall into its range
NO_REDUCTION = 0


def nll_forward(call: OpCall) -> Iterator[Rule]:
    """(self, target, weight, reduction, ignore_index) -> (loss, total_weight)."""
    scores = required_tensor_at(call, 0)
    if len(scores.shape) < 2:
        return
    single = call.args[3] == NO_REDUCTION
    for dim in long_dims(scores):
        if dim == 1:
            inputs: dict[Any, Placement] = {0: Shard(1), 2: Shard(0)}
            outputs: tuple[Placement, ...] = (SUM, REPLICATE)
            yield place(call, inputs, outputs, form=CLASSES, internal_bytes=4)
            continue
        own = dim - (dim > 1)
        loss = Shard(own) if single else SUM
        total_bytes = 0 if single else 4
        yield place(call, {0: Shard(dim), 1: Shard(own)}, (loss, REPLICATE), form=TARGETS, internal_bytes=total_bytes)


def nll_backward(call: OpCall) -> Iterator[Rule]:
    """(grad_output, self, target, weight, reduction, ignore_index, total_weight) -> grad of self."""
    scores = required_tensor_at(call, 1)
    if len(scores.shape) < 2:
        return
    single = call.args[4] == NO_REDUCTION
    for dim in long_dims(scores):
        if dim == 1:
            yield place(call, {1: Shard(1), 3: Shard(0)}, Shard(1), form=CLASSES)
            continue
        own = Shard(dim - (dim > 1))
        yield place(call, {0: own if single else REPLICATE, 1: Shard(dim), 2: own}, Shard(dim))


RULES: RuleTable = {
    "aten.nll_loss_forward.default": nll_forward,
    "aten.nll_loss2d_forward.default": nll_forward,
    "aten.nll_loss_backward.default": nll_backward,
    "aten.nll_loss2d_backward.default": nll_backward,
}
