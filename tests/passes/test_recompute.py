"""What is recomputed leaves the saved tensors, and stands in the backward right before its first reader."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar.passes.local_call import RankGeometry
from autopar.passes.pipeline import LocalProgram, emit
from autopar.passes.recompute import recompute
from autopar.runtime.virtual_groups import virtual_group_names
from tests.passes.filecheck import check, line_of
from tests.passes.hand_plans import MESH, S0, assigned
from tests.passes.programs import captured


def emitted(*ops: str) -> LocalProgram:
    """The perceptron with these ops recomputed, the batch cut."""
    _, _, program = captured("mlp")
    assignment = replace(assigned(program, S0, {"up.weight": S0}), recomputed=named(program.graph_module, *ops))
    return emit(program, assignment, RankGeometry(MESH, (0,), virtual_group_names((0,), MESH), "cpu"))


def named(gm: fx.GraphModule, *ops: str) -> frozenset[str]:
    return frozenset(node.name for node in gm.graph.nodes if node.name.rstrip("_0123456789") in ops)


def test_a_chain_is_recomputed_before_its_first_reader_and_not_saved() -> None:
    local = emitted("addmm", "tanh")
    assert local.backward is not None
    assert {"addmm", "tanh"}.isdisjoint(name.rstrip("_0123456789") for name in local.saved)
    check(local.backward, "CHECK: aten.addmm.default\nCHECK: aten.tanh.default\nCHECK-NEXT: aten.mm.default")


def test_what_a_chain_reads_is_moved_again_rather_than_saved() -> None:
    local = emitted("addmm", "tanh")
    assert local.backward is not None and "up_weight" in local.saved
    check(local.backward, "CHECK: all_to_all_single\nCHECK: all_to_all_single\nCHECK: aten.addmm.default")


def test_a_recomputed_op_reads_what_is_kept() -> None:
    local = emitted("tanh")
    assert any(name.startswith("wait_tensor") for name in local.saved)  # the sum, as the forward has moved it
    check(local.backward, "CHECK-NOT: aten.addmm.default")  # type: ignore[arg-type]


def test_an_op_that_only_the_backward_reads_leaves_the_forward() -> None:
    _, _, program = captured("mlp")
    once = recompute(program.graph_module, program, named(program.graph_module, "t"))
    originals = [node for node in program.graph_module.graph.nodes if node.name.rstrip("_0123456789") == "t"]
    kept = {node.name for node in once.graph.nodes}
    for node in originals:
        only_backward = all(user.meta.get("phase") == "backward" for user in node.users)
        assert (node.name in kept) != only_backward or node.meta["phase"] == "backward"


def test_nothing_named_changes_nothing() -> None:
    _, _, program = captured("transformer")
    same = recompute(program.graph_module, program, ())
    assert [line_of(node) for node in same.graph.nodes] == [line_of(node) for node in program.graph_module.graph.nodes]


def test_buffers_are_written_by_the_forward_alone() -> None:
    _, _, program = captured("convnet")
    everything = {node.name for node in program.graph_module.graph.nodes if node.op == "call_function"}
    twice = recompute(program.graph_module, program, everything)
    results = [node.name for node in twice.graph.output_node().args[0]]  # type: ignore[union-attr]
    assert results == [node.name for node in program.graph_module.graph.output_node().args[0]]  # type: ignore[union-attr]
