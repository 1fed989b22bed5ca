"""Cutting and joining along a dim that is sharded: ranks exchange what the other layout puts elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Shard

from autopar.sharding.op_call import OpCall
from autopar.sharding.rule import Rule
from autopar.sharding.rules.placing import wrap_dim

EXCHANGED = "exchanged"  # the dim that is cut or joined is sharded on both sides
QUARTER = 4  # an all-to-all sends what an all-reduce of a quarter of the tensor sends (on two ranks; less on more)


def exchanged(call: OpCall, dim: int) -> Iterator[Rule]:
    """The rule that shards `dim` in every input and output."""
    specs = [spec for spec in (*call.inputs, *call.outputs) if spec is not None]
    if all(len(spec.shape) == len(specs[0].shape) and spec.shape[dim] > 1 for spec in specs):
        total_bytes = sum(spec.nbytes for spec in call.inputs)
        placement = Shard(dim)
        inputs, outputs = (placement,) * len(call.inputs), (placement,) * len(call.outputs)
        yield Rule(inputs, outputs, form=EXCHANGED, internal_bytes=total_bytes // QUARTER)


def dim_of(call: OpCall, position: int) -> int:
    """The dim named by an argument, counted from the front."""
    return wrap_dim(call.argument(position, "dim", 0), len(call.inputs[0].shape))
