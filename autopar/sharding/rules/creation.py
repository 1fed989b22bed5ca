"""Ops that make tensors: born sharded, each rank making its part."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Shard

from autopar.sharding.layout import REPLICATE
from autopar.sharding.op_call import OpCall
from autopar.sharding.rule import Rule
from autopar.sharding.rules.placing import SUM, RuleTable, long_dims, names, result, summable

OFFSET = "offset"  # a rank starts at its own offset


def filled(call: OpCall) -> Iterator[Rule]:
    """`full`, `ones`, `new_full`, ...: the same value everywhere; of an input only dtype and device are read."""
    for dim in long_dims(result(call)):
        yield Rule((REPLICATE,) * len(call.inputs), (Shard(dim),))
        if call.inputs and all(spec.shape[dim : dim + 1] == result(call).shape[dim : dim + 1] for spec in call.inputs):
            yield Rule((Shard(dim),) * len(call.inputs), (Shard(dim),))  # lies as its input does


def zeros(call: OpCall) -> Iterator[Rule]:
    """Zeros are also the addends of zeros."""
    yield from filled(call)
    if summable(result(call)):
        yield Rule((REPLICATE,) * len(call.inputs), (SUM,))


def counted(call: OpCall) -> Iterator[Rule]:
    """`arange`: each rank counts from its own start."""
    if all(isinstance(bound, int) for bound in call.args) and result(call).shape[0] > 1:
        yield Rule((), (Shard(0),), form=OFFSET)


def whole(call: OpCall) -> Iterator[Rule]:
    """Small or intertwined: every rank makes or computes the whole."""
    return iter(())


RULES: RuleTable = {
    **dict.fromkeys(
        names("""
            aten.full.default aten.ones.default aten.empty.memory_format aten.new_full.default
            aten.new_ones.default aten.new_empty.default
        """),
        filled,
    ),
    **dict.fromkeys(
        names("""
            aten.scalar_tensor.default aten.eye.default aten.eye.m aten.linspace.default aten.logspace.default
            aten.tril_indices.default aten.triu_indices.default aten.as_strided.default aten.trace.default
            aten.median.default aten.nanmedian.default aten.histc.default aten.masked_scatter.default
            aten.empty_strided.default aten.new_empty_strided.default aten.empty_permuted.default
            aten.block_diag.default aten.as_strided_copy.default aten.as_strided_scatter.default
        """),
        whole,
    ),
    "aten.zeros.default": zeros,
    "aten.new_zeros.default": zeros,
    "aten.arange.default": counted,
    "aten.arange.start": counted,
    "aten.arange.start_step": counted,
}
