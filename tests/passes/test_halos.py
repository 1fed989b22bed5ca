"""Halos: what is emitted for a convolution over sharded space is an exchange of the rows at the edges, and a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from autopar.passes.collectives import is_collective
from autopar.sharding.execution import call_in, trace_op
from autopar.sharding.registry import rules_of
from autopar.sharding.rule import Rule
from tests.passes.filecheck import check
from tests.passes.test_localize import local_graph

aten = torch.ops.aten
SOURCE = torch.ones(1, 2, 16, 8)


def convolution(kernel: int, stride: int, padding: int) -> fx.GraphModule:
    weight = torch.ones(4, 2, kernel, kernel)
    how: list[Any] = [[stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1]
    return trace_op(aten.convolution.default, (SOURCE, weight, torch.ones(4), *how), {})


def over_rows(gm: fx.GraphModule) -> Rule:
    """The rule that cuts dim 2."""
    return next(rule for rule in rules_of(call_in(gm)) if rule.outputs[0] == Shard(2))


def test_a_rank_in_the_middle_sends_and_gets_one_row_of_either_neighbour() -> None:
    gm = convolution(3, 1, 1)
    local = local_graph(gm, over_rows(gm), rank=1, ranks=4)
    expected = """
        CHECK: slice_1 = aten.slice.Tensor(tensor_0, 2, 0, 1)
        CHECK: slice_2 = aten.slice.Tensor(tensor_0, 2, 3, 4)
        CHECK: _c10d_functional.all_to_all_single.default(cat, [16, 0, 16, 0], [16, 0, 16, 0]
        CHECK-NEXT: wait_tensor
        CHECK: cat_1 = aten.cat.default([view_2, tensor_0, view_3], 2)
        CHECK-NEXT: aten.convolution.default(cat_1, tensor_1, tensor_2, [1, 1], [0, 1], [1, 1], False, [0, 0], 1)
        CHECK-NOT: aten
    """
    check(local, expected)


def test_a_rank_at_the_edge_has_the_zeros_of_the_padding() -> None:
    gm = convolution(3, 1, 1)
    local = local_graph(gm, over_rows(gm), rank=0, ranks=4)
    check(
        local, "CHECK: new_zeros = aten.new_zeros.default(tensor_0, [1, 2, 1, 8])\nCHECK: [new_zeros, tensor_0, view_1]"
    )


def test_windows_that_lie_side_by_side_send_nothing() -> None:
    for gm in (convolution(1, 1, 0), convolution(2, 2, 0)):
        local = local_graph(gm, over_rows(gm), rank=1, ranks=4)
        assert [node.name for node in local.graph.nodes if node.op == "call_function"] == ["convolution"]


def test_every_rank_takes_part_in_the_exchange() -> None:
    """Rank 3 reads nothing of other ranks here, and is in the all-to-all all the same."""
    gm = convolution(2, 1, 0)
    for rank in range(4):
        local = local_graph(gm, over_rows(gm), rank=rank, ranks=4)
        assert sum(map(is_collective, local.graph.nodes)) == 1


def test_the_gradients_of_a_halo_are_added_where_it_came_from() -> None:
    weight, grad = torch.ones(4, 2, 3, 3), torch.ones(1, 4, 16, 8)
    how: list[Any] = [[4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False]]
    gm = trace_op(aten.convolution_backward.default, (grad, SOURCE, weight, *how), {})
    local = local_graph(gm, over_rows(gm), rank=1, ranks=4)
    expected = """
        CHECK: aten.convolution_backward.default
        CHECK: _c10d_functional.all_to_all_single.default
        CHECK: aten.add.Tensor
        CHECK: aten.add.Tensor
        CHECK: aten.cat.default
        CHECK-NOT: aten.add.Tensor
    """
    check(local, expected)
