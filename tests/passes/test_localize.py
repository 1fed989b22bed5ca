"""localize: the same program in the shapes of one rank's shards."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Partial, Replicate, Shard

from autopar.errors import RuleError
from autopar.passes.local_call import RankGeometry
from autopar.passes.localize import localize
from autopar.passes.moves import move
from autopar.sharding.assignment import Assignment
from autopar.sharding.execution import trace_op, virtual_geometries
from autopar.sharding.layout import Layout
from autopar.sharding.rule import Rule
from autopar.sharding.strategies import Strategy
from tests.passes.filecheck import check

aten = torch.ops.aten
R, P = Replicate(), Partial()


def local_graph(gm: fx.GraphModule, rule: Rule, rank: int = 0, ranks: int = 2) -> fx.GraphModule:
    """One rank's part of a graph of one op."""
    placeholders = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    inputs: dict[str, Layout] = {name: (layout,) for name, layout in zip(placeholders, rule.inputs, strict=True)}
    assignment = Assignment((ranks,), {"op": Strategy((rule,))}, inputs, ())
    return localize(gm, assignment, virtual_geometries((ranks,))[rank])


def shapes(gm: fx.GraphModule) -> dict[str, tuple[int, ...]]:
    return {
        node.name: tuple(node.meta["val"].shape)
        for node in gm.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
    }


def test_every_value_has_the_shape_of_its_shard() -> None:
    gm = trace_op(aten.mm.default, (torch.ones(4, 6), torch.ones(6, 8)), {})
    local = local_graph(gm, Rule((Shard(1), Shard(0)), (P,)))
    assert shapes(local) == {"tensor_0": (4, 3), "tensor_1": (3, 8), "mm": (4, 8)}


def test_a_tail_is_as_short_as_it_lies() -> None:
    gm = trace_op(aten.relu.default, (torch.ones(5, 3),), {})
    rule = Rule((Shard(0),), (Shard(0),))
    assert [shapes(local_graph(gm, rule, rank))["relu"] for rank in range(2)] == [(3, 3), (2, 3)]


def test_sizes_among_the_arguments_become_local() -> None:
    gm = trace_op(aten.view.default, (torch.ones(4, 6, 8), [24, 8]), {})
    check(local_graph(gm, Rule((Shard(0),), (Shard(0),), even=True)), "CHECK: aten.reshape.default(tensor_0, [12, 8])")


def test_a_view_that_strides_forbid_is_a_copy_first() -> None:
    gm = trace_op(aten.t.default, (torch.ones(4, 6),), {})
    turned = next(node for node in gm.graph.nodes if node.name == "op")
    with gm.graph.inserting_after(turned):
        flat = gm.graph.create_node("call_function", aten._reshape_copy.default, (turned, [24]), {}, "flat")
    flat.meta["val"] = turned.meta["val"].reshape(24)
    whole = Strategy((Rule((R,), (R,)),))
    assignment = Assignment((2,), {"op": whole, "flat": whole}, {"tensor_0": (R,)}, ())
    local = localize(gm, assignment, virtual_geometries((2,))[0])
    check(local, "CHECK: aten.clone.default\nCHECK-NEXT: aten.reshape.default")


def test_a_replicated_program_stays_as_it_was() -> None:
    gm = trace_op(aten.addmm.default, (torch.ones(8), torch.ones(4, 6), torch.ones(6, 8)), {})
    local = local_graph(gm, Rule((R, R, R), (R,)))
    assert [node.target for node in local.graph.nodes] == [
        node.target if node.op != "call_function" else aten.addmm.default for node in gm.graph.nodes
    ]


def test_a_bias_is_added_on_one_rank_only() -> None:
    gm = trace_op(aten.addmm.default, (torch.ones(8), torch.ones(4, 6), torch.ones(6, 8)), {})
    rule = Rule((R, Shard(1), Shard(0)), (P,), form="bias_once")
    check(local_graph(gm, rule, rank=0), "CHECK: aten.addmm.default")
    check(local_graph(gm, rule, rank=1), "CHECK: aten.mm.default")


def test_a_vocabulary_is_looked_up_without_a_collective() -> None:
    gm = trace_op(aten.embedding.default, (torch.ones(50, 8), torch.ones(4, 6, dtype=torch.int64)), {})
    expected = """
        CHECK: aten.sub.Tensor(tensor_1, 25)
        CHECK: aten.embedding.default
        CHECK-NOT: _c10d_functional
    """
    check(local_graph(gm, Rule((Shard(0), R), (P,), form="rows"), rank=1), expected)


def test_a_softmax_over_a_sharded_dim_pays_two_all_reduces_of_rows() -> None:
    gm = trace_op(aten._log_softmax.default, (torch.ones(4, 50), 1, False), {})
    local = local_graph(gm, Rule((Shard(1),), (Shard(1),), form="normalized"))
    reduced = [node for node in local.graph.nodes if "all_reduce" in str(node.target)]
    assert [(tuple(node.meta["val"].shape), node.args[1]) for node in reduced] == [((4, 1), "max"), ((4, 1), "sum")]


def test_a_split_along_a_sharded_dim_pays_one_all_to_all() -> None:
    gm = trace_op(aten.split.Tensor, (torch.ones(4, 36), 12, 1), {})
    local = local_graph(gm, Rule((Shard(1),), (Shard(1),) * 3, form="exchanged"))
    assert [str(node.target) for node in local.graph.nodes if "all_" in str(node.target)] == [
        "_c10d_functional.all_to_all_single.default"
    ]
    assert [tuple(node.meta["val"].shape) for node in local.graph.output_node().args[0]] == [(4, 6)] * 3


def test_creation_happens_on_the_device_of_the_program() -> None:
    gm = trace_op(aten.zeros.default, ([4, 6],), {"device": torch.device("meta")})
    local = local_graph(gm, Rule((), (Shard(0),)))
    (made,) = (node for node in local.graph.nodes if node.target is aten.zeros.default)
    assert (made.args[0], made.kwargs["device"]) == ([2, 6], torch.device("cpu"))


def test_new_nodes_inherit_the_users_line_and_name_the_pass() -> None:
    gm = trace_op(aten._log_softmax.default, (torch.ones(4, 50), 1, False), {})
    next(node for node in gm.graph.nodes if node.name == "op").meta["stack_trace"] = "here"
    local = local_graph(gm, Rule((Shard(1),), (Shard(1),), form="normalized"))
    calls = [node for node in local.graph.nodes if node.op == "call_function"]
    assert all(node.meta["stack_trace"] == "here" and node.meta["pass"] == "localize" for node in calls)


def test_a_move_becomes_collectives() -> None:
    graph = fx.Graph()
    source = graph.placeholder("x")
    with FakeTensorMode():
        source.meta["val"] = torch.empty(4, 6)
    moved = graph.call_function(move, (source, "P", "R"))
    moved.meta["val"] = source.meta["val"]
    graph.output((moved,))
    assignment = Assignment((2,), {}, {"x": (P,)}, ())
    local = localize(fx.GraphModule(torch.nn.Module(), graph), assignment, virtual_geometries((2,))[0])
    check(local, "CHECK: all_reduce.default")


def test_a_form_that_nobody_wrote_is_refused() -> None:
    gm = trace_op(aten.relu.default, (torch.ones(4, 6),), {})
    with pytest.raises(RuleError, match=r"aten.relu.default has no local form, but its rules ask for \['magic'\]"):
        local_graph(gm, Rule((Shard(0),), (Shard(0),), form="magic"))


def test_the_callers_graph_stays_as_it_was() -> None:
    gm = trace_op(aten.view.default, (torch.ones(4, 6, 8), [24, 8]), {})
    before = str(gm.graph)
    local_graph(gm, Rule((Shard(0),), (Shard(0),), even=True))
    assert str(gm.graph) == before


def test_a_geometry_knows_the_chunk_of_its_rank() -> None:
    geometry = RankGeometry((2, 2), (1, 0), ("a", "b"), "cpu")
    assert geometry.chunk((8, 6), (Shard(0), Shard(1))) == ((4, 0), (4, 3))
