"""Collectives start early and are waited for late, within bounds."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from autopar.fake_calls import FakeCalls
from autopar.passes.collectives import is_collective
from autopar.passes.local_call import GraphBuilder, RankGeometry
from autopar.passes.moves import local_move
from autopar.passes.schedule_collectives import schedule_collectives
from tests.passes.filecheck import check
from tests.passes.hand_plans import MESH, S0, R, emitted


def test_the_next_gather_is_issued_before_the_current_product() -> None:
    """FSDP: while one layer computes, the next one's parameters arrive, and no others."""
    gm = schedule_collectives(three_gathered_products())
    check(
        gm,
        """
        CHECK: all_gather_into_tensor.default(w0
        CHECK: all_gather_into_tensor.default(clone
        CHECK-NOT: all_gather_into_tensor.default(clone_1
        CHECK: mm = aten.mm
        CHECK: all_gather_into_tensor.default(clone_1
        CHECK: mm_1 = aten.mm
        CHECK: wait_tensor.default(all_gather_into_tensor_2)
        CHECK: mm_2 = aten.mm
        """,
    )


def three_gathered_products() -> fx.GraphModule:
    """x @ w0 @ w1.t() @ w2.t() with stored shards, each gathered right before it is read."""
    build = GraphBuilder(
        fx.Graph(), FakeCalls(FakeTensorMode()), RankGeometry(MESH, (0,), ("autopar/axis0/0,1",), "cpu")
    )
    build.meta = {"phase": "forward"}
    with build.fake_calls.mode:
        values = [build.graph.placeholder(name) for name in ("x", "w0", "w1", "w2")]
        for node, shape in zip(values, ((4, 4), (2, 4), (4, 2), (4, 2)), strict=True):
            node.meta.update(val=torch.empty(shape), phase="forward")
    x, *weights = values
    for index, weight in enumerate(weights):
        shard = weight if index == 0 else build.op(torch.ops.aten.t.default, weight)
        build.meta["move"] = f"move_{index}"
        whole = local_move(build, shard, (4, 4), S0, R)
        del build.meta["move"]
        x = build.op(torch.ops.aten.mm.default, x, whole)
    build.graph.output((x,))
    return fx.GraphModule({}, build.graph)


def test_gradients_scatter_beside_the_next_product() -> None:
    local = emitted(S0, {"up.weight": S0, "up.bias": S0, "down.weight": S0})
    assert local.backward is not None
    check(
        local.backward,
        """
        CHECK: = _c10d_functional.reduce_scatter_tensor
        CHECK-NOT: wait_tensor.default(reduce_scatter_tensor)
        CHECK: aten.mm
        """,
    )


def test_a_graph_without_collectives_keeps_its_order() -> None:
    joint = emitted(R, {}).joint
    assert [node.name for node in schedule_collectives(joint).graph.nodes] == [node.name for node in joint.graph.nodes]


def test_scheduling_keeps_the_order_of_collectives() -> None:
    gm = three_gathered_products()
    orders = [[node.name for node in it.graph.nodes if is_collective(node)] for it in (gm, schedule_collectives(gm))]
    assert orders[0] == orders[1]
