"""Convolutions: batch, input channels (partial sums), output channels, groups, space (with halos)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.sharding.layout import REPLICATE
from autopar.sharding.op_call import OpCall
from autopar.sharding.rule import Rule
from autopar.sharding.rules.matmul import BIAS_ONCE
from autopar.sharding.rules.placing import SUM, RuleTable, place, required_tensor_at, result
from autopar.sharding.rules.spatial import HALO, convolved, halo_of

GROUPS = "groups"  # the number of groups among the arguments is this rank's


def _is_batched(call: OpCall, tensor: int, weight: int) -> bool:
    return len(required_tensor_at(call, tensor).shape) == len(required_tensor_at(call, weight).shape)


def convolution(call: OpCall) -> Iterator[Rule]:
    """(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)."""
    if not _is_batched(call, 0, 1):
        return
    transposed, groups = bool(call.args[6]), call.args[8]
    yield place(call, {0: Shard(0)}, Shard(0))
    source, weight = required_tensor_at(call, 0), required_tensor_at(call, 1)
    for dim, window in convolved(source, result(call), weight, call.args[3:7]):
        if min(window.size, window.results) > 1:
            yield place(call, {0: Shard(dim)}, Shard(dim), form=HALO, halo=halo_of(window, source, dim))
    if groups > 1:
        inputs: dict[Any, Placement] = {0: Shard(1), 1: Shard(0), 2: Shard(0)}
        yield place(call, inputs, Shard(1), form=GROUPS, even=True, splits=groups)
        return
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    yield place(call, {1: Shard(out_dim), 2: Shard(0)}, Shard(1))
    yield place(call, {0: Shard(1), 1: Shard(in_dim)}, SUM, form=BIAS_ONCE)


def convolution_backward(call: OpCall) -> Iterator[Rule]:
    """(grad, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask)."""
    if not _is_batched(call, 1, 2):
        return
    transposed, groups = bool(call.args[7]), call.args[9]
    yield place(call, {0: Shard(0), 1: Shard(0)}, (Shard(0), SUM, SUM))
    grad, source, weight = (required_tensor_at(call, index) for index in range(3))
    rounds = 2 if call.args[10][0] else 1  # the input's halo is fetched, and the gradient's returned
    for dim, window in convolved(source, grad, weight, call.args[4:8]):
        if min(window.size, window.results) > 1:
            halo = halo_of(window, source, dim, tensor=1, rounds=rounds)
            yield place(call, {0: Shard(dim), 1: Shard(dim)}, (Shard(dim), SUM, SUM), form=HALO, halo=halo)
    if groups > 1:
        inputs: dict[Any, Placement] = {0: Shard(1), 1: Shard(1), 2: Shard(0)}
        outputs: tuple[Placement, ...] = (Shard(1), Shard(0), Shard(0))
        yield place(call, inputs, outputs, form=GROUPS, even=True, splits=groups)
        return
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    yield place(call, {0: Shard(1), 2: Shard(out_dim)}, (SUM, Shard(out_dim), Shard(0)))
    yield place(call, {1: Shard(1), 2: Shard(in_dim)}, (Shard(1), Shard(in_dim), REPLICATE))


RULES: RuleTable = {
    "aten.convolution.default": convolution,
    "aten.convolution_backward.default": convolution_backward,
}
