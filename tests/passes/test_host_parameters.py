"""Parameters on the host: what reads them reads a copy on the device, and their gradients leave to the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.capture.program import InputKind, OutputKind, Program, results_of
from autopar.passes.local_call import RankGeometry
from autopar.passes.pipeline import LocalProgram, emit
from autopar.runtime.virtual_groups import virtual_group_names
from autopar.sharding.layout import Layout
from tests.passes.filecheck import check, line_of
from tests.passes.hand_plans import MESH, S0, assigned
from tests.passes.programs import captured
from tests.passes.running import Step, emit_all

GEOMETRY = RankGeometry(MESH, (0,), virtual_group_names((0,), MESH), "cpu")
STORED: dict[str, dict[str, Layout]] = {"mlp": {"up.weight": S0}, "transformer": {"qkv.weight": S0}, "convnet": {}}


def parameters_of(program: Program) -> frozenset[str]:
    return frozenset(item.node for item in program.inputs if item.kind is InputKind.PARAMETER)


def emitted(name: str, hosted: frozenset[str]) -> LocalProgram:
    _, _, program = captured(name)
    return emit(program, replace(assigned(program, S0, STORED[name]), hosted=hosted), GEOMETRY)


def test_a_copy_is_waited_for_at_the_first_reader_of_each_phase_and_the_gradient_is_sent_back() -> None:
    local = emitted("mlp", frozenset({"down_weight"}))
    assert local.backward is not None
    check(local.forward, "CHECK: autopar.reload\nCHECK: aten.addmm\nCHECK: autopar.wait_copy\nCHECK: aten.mm")
    check(local.backward, "CHECK: autopar.reload\nCHECK: autopar.wait_copy\nCHECK: aten.mm\nCHECK: autopar.offload")
    assert "down_weight" in local.saved and not [name for name in local.saved if "copy" in name]
    names = [output.name for output in local.program.outputs if output.kind is OutputKind.GRADIENT]
    sent = results_of(local.backward.graph)[names.index("down.weight")]
    assert sent is not None and sent.target is torch.ops.autopar.wait_copy.default


def test_what_is_stored_cut_is_copied_cut_and_gathered_on_the_device() -> None:
    local = emitted("mlp", frozenset({"up_weight"}))
    check(local.forward, "CHECK: autopar.reload\nCHECK: autopar.wait_copy\nCHECK: all_to_all_single")


def test_copies_queue_in_the_order_of_need() -> None:
    local = emitted("transformer", parameters_of(captured("transformer")[2]))
    assert local.backward is not None
    for gm in (local.forward, local.backward):
        nodes = list(gm.graph.nodes)
        copies = [node for node in nodes if node.target is torch.ops.autopar.reload.default]
        waits = [next(iter(node.users)) for node in copies]
        needed = [min(nodes.index(user) for user in wait.users) for wait in waits]
        assert len(copies) >= 5 and needed == sorted(needed)


@pytest.mark.parametrize("name", ["mlp", "transformer", "convnet"])
def test_every_gradient_is_what_it_is_with_parameters_on_the_device(name: str) -> None:
    model, inputs, program = captured(name)
    plain = assigned(program, S0, STORED[name])
    expected = Step(model, inputs, emit_all(program, plain), plain).run()
    for hosted in (parameters_of(program), frozenset(sorted(parameters_of(program))[::2])):
        assignment = replace(plain, hosted=hosted)
        actual = Step(model, inputs, emit_all(program, assignment), assignment).run()
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(actual[key], value)


def test_a_gradient_that_stays_is_given_back_on_the_device() -> None:
    model, inputs, program = captured("mlp")
    both = frozenset({"up_weight", "down_weight"})
    plain = assigned(program, S0, STORED["mlp"])
    assignment = replace(plain, hosted=both, staying=frozenset({"down_weight"}))
    local = emit(program, assignment, GEOMETRY)
    assert local.backward is not None
    outputs = [output for output in program.outputs if output.kind is OutputKind.GRADIENT]
    results = dict(zip((output.name for output in outputs), results_of(local.backward.graph), strict=True))
    sent = {name for name, node in results.items() if node is not None and "wait_copy" in str(node.target)}
    assert sent == {"up.weight"}
    expected = Step(model, inputs, emit_all(program, plain), plain).run()
    actual = Step(model, inputs, emit_all(program, assignment), assignment).run()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value)


def test_nothing_on_the_host_changes_nothing() -> None:
    one, other = emitted("transformer", frozenset()), emitted("transformer", frozenset({"nowhere"}))
    assert [line_of(node) for node in one.forward.graph.nodes] == [line_of(node) for node in other.forward.graph.nodes]
