"""What the passes emit for the plans that experts write by hand."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard

from autopar.capture.program import InputKind, OutputKind, Program
from autopar.passes.insert_moves import insert_moves, moves_of
from autopar.passes.local_call import GraphBuilder, RankGeometry
from autopar.passes.moves import local_move
from autopar.passes.pipeline import LocalProgram, emit
from autopar.passes.schedule_collectives import schedule_collectives
from autopar.runtime.virtual_groups import virtual_group_names
from autopar.sharding.assignment import Assignment, is_getitem
from autopar.sharding.layout import Layout
from autopar.sharding.op_call import call_of, tensor_inputs
from autopar.sharding.registry import rules_of
from autopar.sharding.reshard import reshard_steps
from autopar.sharding.strategies import Strategy, strategies_of
from tests.passes.filecheck import check
from tests.passes.programs import captured

MESH = (2,)
S0, S1, R = (Shard(0),), (Shard(1),), (Replicate(),)


def assigned(program: Program, batch: Layout, parameters: Mapping[str, Layout]) -> Assignment:
    """Activations follow the batch: each op runs where its largest input lies, and takes the others there."""
    names = {item.node: item for item in program.inputs}
    strategies: dict[str, Strategy] = {}
    nodes = list(program.graph_module.graph.nodes)
    inputs = {name: parameters.get(item.name, R) for name, item in names.items()}
    for node in nodes:
        if node.op == "placeholder" and names[node.name].kind is InputKind.INPUT:
            inputs[node.name] = batch
    assignment = Assignment(MESH, strategies, inputs, ())
    for node in nodes:
        if node.op == "call_function" and not is_getitem(node):
            strategies[node.name] = _cheapest(node, assignment, 1 if batch == S0 else -1)
    outputs = tuple(
        parameters.get(output.name, R) if output.kind is OutputKind.GRADIENT else R for output in program.outputs
    )
    return Assignment(MESH, strategies, inputs, outputs)


def _cheapest(node: fx.Node, assignment: Assignment, price_of_replica: int) -> Strategy:
    """The strategy whose inputs take the fewest bytes to bring; of those, the one with the cheapest replicas."""
    call = call_of(node)
    made = [assignment.layout_of(source) for source in tensor_inputs(node)]

    def cost(strategy: Strategy) -> tuple[int, int]:
        moved = 0
        for spec, source, target in zip(call.inputs, made, strategy.inputs, strict=True):
            if any(it.is_partial() for it in target) and source != target:
                return 10**9, 0
            moved += sum(step.bytes for step in reshard_steps(spec, source, target, MESH, lambda *_: 0.0))
        return moved, price_of_replica * sum(layout == R for layout in (*strategy.inputs, *strategy.outputs))

    return min(strategies_of(call, rules_of(call), MESH), key=cost)


def emitted(batch: Layout, parameters: Mapping[str, Layout]) -> LocalProgram:
    _, _, program = captured("mlp")
    geometry = RankGeometry(MESH, (0,), virtual_group_names((0,), MESH), "cpu")
    return emit(program, assigned(program, batch, parameters), geometry)


def test_a_replicated_program_has_no_collectives() -> None:
    local = emitted(R, {})
    assert local.backward is not None
    for gm in (local.forward, local.backward):
        check(gm, "CHECK-NOT: _c10d_functional")


def test_moves_are_inserted_nowhere_when_layouts_agree() -> None:
    _, _, program = captured("mlp")
    gm = insert_moves(program.graph_module, assigned(program, R, {}))
    assert list(moves_of(gm)) == []


def test_data_parallelism_sums_each_gradient_once() -> None:
    local = emitted(S0, {})
    assert local.backward is not None
    check(local.backward, "CHECK: all_reduce\nCHECK: all_reduce\nCHECK: all_reduce\nCHECK-NOT: = _c10d_functional.all_")


def test_a_tensor_parallel_mlp_pays_one_all_reduce() -> None:
    local = emitted(R, {"up.weight": S0, "up.bias": S0, "down.weight": S1})
    check(
        local.forward,
        """
        CHECK-NOT: _c10d_functional
        CHECK: aten.addmm
        CHECK-NOT: _c10d_functional
        CHECK: aten.mm
        CHECK-NEXT: all_reduce.default(mm, sum
        CHECK-NEXT: wait_tensor
        CHECK-NOT: all_reduce.default
        """,
    )
    assert local.backward is not None
    check(local.backward, "CHECK-NOT: _c10d_functional")  # the sum is saved, not taken again


def test_parameters_are_saved_as_they_are_stored() -> None:
    local = emitted(S0, {"up.weight": S0, "up.bias": S0, "down.weight": S0})
    assert "down_weight" in local.saved
    placeholders = [node.name for node in local.backward.graph.nodes if node.op == "placeholder"]  # type: ignore[union-attr]
    assert placeholders == [*local.saved, "tangent_output"]


def test_views_are_taken_again_in_the_backward() -> None:
    local = emitted(R, {})
    assert local.backward is not None and "t_1" not in local.saved
    check(local.backward, "CHECK: t_1 = aten.t.default(down_weight)")


def test_boxed_graphs_empty_their_list() -> None:
    assert "arguments.clear()" in emitted(R, {}).forward.code


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
    build = GraphBuilder(fx.Graph(), FakeTensorMode(), RankGeometry(MESH, (0,), ("autopar/axis0/0,1",), "cpu"))
    build.meta = {"phase": "forward"}
    with build.fake_mode:
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
