"""What is packed leaves the saved tensors in its form, and is there again before the backward reads it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from autopar.capture.trace import capture
from autopar.passes.local_call import RankGeometry
from autopar.passes.packings import Saved, form_for
from autopar.passes.pipeline import LocalProgram, emit
from autopar.passes.storages import storages_of
from autopar.runtime.virtual_groups import virtual_group_names
from autopar.sharding.op_call import call_of
from tests.passes.filecheck import check, line_of
from tests.passes.hand_plans import MESH, S0, assigned
from tests.passes.programs import captured

GEOMETRY = RankGeometry(MESH, (0,), virtual_group_names((0,), MESH), "cpu")


def emitted(packed: dict[tuple[str, int], str], name: str = "mlp") -> LocalProgram:
    """A program with some values packed; the perceptron with its batch cut and a parameter sharded."""
    _, _, program = captured(name)
    assignment = assigned(program, S0, {"up.weight": S0} if name == "mlp" else {})
    return emit(program, replace(assignment, packed=packed), GEOMETRY)


def keys(op: str, name: str = "mlp") -> list[str]:
    _, _, program = captured(name)
    nodes = program.graph_module.graph.nodes
    return [
        node.meta["key"] for node in nodes if f"/{op}#" in node.meta.get("key", "") and node.meta["phase"] == "forward"
    ]


def test_a_copy_starts_where_the_value_is_made_and_is_waited_for_behind_its_last_reader() -> None:
    (tanh,) = keys("tanh")
    local = emitted({(tanh, 0): "offload"})
    assert local.backward is not None
    check(local.forward, "CHECK: aten.tanh\nCHECK-NEXT: autopar.offload\nCHECK: aten.mm\nCHECK: autopar.wait_copy")
    check(local.backward, "CHECK: autopar.reload\nCHECK: autopar.wait_copy\nCHECK: aten.tanh_backward")
    assert [name for name in local.saved if name.startswith("wait_copy")]
    assert not [name for name in local.saved if name.startswith("tanh")]


def test_signs_are_taken_behind_the_last_reader_and_unpacked_right_before_the_first() -> None:
    (relu,) = keys("relu", "convnet")
    local = emitted({(relu, 0): "signs"}, "convnet")
    assert local.backward is not None
    check(local.backward, "CHECK: autopar.unpack_bits\nCHECK-NEXT: aten.threshold_backward")
    assert [name for name in local.saved if name.startswith("pack_bits")]


VALUES = ("embedding", "mm", "addmm", "softmax", "_softmax", "bmm", "add.Tensor", "clone")


def test_what_is_read_through_a_view_is_viewed_again() -> None:
    packed = {(key, 0): "offload" for op in VALUES for key in keys(op, "transformer")}
    local, plain = emitted(packed, "transformer"), emitted({}, "transformer")
    assert local.backward is not None and plain.backward is not None
    reloads = [node for node in local.backward.graph.nodes if node.target is torch.ops.autopar.reload.default]
    assert len(reloads) >= 4
    for node in local.joint.graph.nodes:
        if node.target is torch.ops.autopar.reload.default:
            assert node.meta["phase"] == "backward"
    same = {node.name: node.meta["val"] for node in plain.joint.graph.nodes if "val" in node.meta}
    for node in local.joint.graph.nodes:  # views of what came back have the strides of those of what left
        if node.name in same and isinstance(node.meta["val"], torch.Tensor):
            assert node.meta["val"].stride() == same[node.name].stride()


def test_what_the_backward_views_lies_in_what_came_back() -> None:
    """A storage of the forward lives on in the backward only if it is handed over: the plan's memory counts on it."""
    local = emitted({(key, 0): "offload" for op in VALUES for key in keys(op, "transformer")}, "transformer")
    assert local.backward is not None
    early = {storage for node in local.forward.graph.nodes if node.op != "output" for storage in storages_of(node)}
    late = [node for node in local.backward.graph.nodes if node.op != "output"]
    given = {storage for node in late if node.op == "placeholder" for storage in storages_of(node)}
    for node in late:
        assert not (early & storages_of(node).keys()) - given, node.name


def test_nothing_packed_changes_nothing() -> None:
    same = emitted({}, "transformer")
    other = emitted({("nowhere/add#0", 0): "offload"}, "transformer")
    assert [line_of(node) for node in same.forward.graph.nodes] == [line_of(node) for node in other.forward.graph.nodes]


def saved(graph: fx.Graph, op: str, reader: str, place: int, output: int = 0) -> Saved:
    value = next(node for node in graph.nodes if op in str(node.target))
    late = next(node for node in graph.nodes if reader in str(node.target))
    return Saved(call_of(value), output, ((call_of(late), place),))


@pytest.mark.parametrize("size, name", [(8, "uint8"), (64, "int16"), (256, "int32")])
def test_indices_take_as_few_bytes_as_they_need(size: int, name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.MaxPool2d(2)).to("meta")
    gm = capture(model, (torch.empty(1, 1, size, size, device="meta"),), {}).graph_module
    found = form_for("compress", saved(gm.graph, "max_pool2d_with_indices.default", "indices_backward", 2, 1))
    assert found is not None and found.name == name


def test_a_relu_that_a_product_reads_too_has_no_exact_form() -> None:
    _, _, program = captured("convnet")
    value = saved(program.graph_module.graph, "relu", "threshold_backward", 1)
    assert form_for("compress", value) is not None
    assert form_for("compress", replace(value, readers=(*value.readers, (value.call, 0)))) is None
    assert form_for("compress", replace(value, readers=(*value.readers, None))) is None
