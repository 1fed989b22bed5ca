"""Stages: cut anywhere, run forward in order and backward in reverse, they give what the program gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.program import InputKind, OutputKind, Program
from autopar.passes.split_phases import split_phases
from autopar.stages.assign import anatomy, assign_stages
from autopar.stages.stage_programs import StagedProgram, is_boundary, stage_programs
from autopar.zoo.plain import make_plain
from tests.autopar.models import MODELS
from tests.autopar.stages.test_microbatch import Strided, captured


def cut(program: Program, stages: int) -> StagedProgram:
    """Equal numbers of ops, wherever that cuts."""
    found = anatomy(program)
    return stage_programs(assign_stages(found, [len(found.forward) * at // stages for at in range(1, stages)]))


def run_stages(staged: StagedProgram, named: dict[Any, Tensor]) -> dict[Any, Tensor]:
    """All outputs of the program, of all stages; gradients with parts on several stages added up."""
    results: dict[Any, Tensor] = {}
    sent: dict[Any, Tensor] = {}
    kept = {}
    phases = {stage.index: split_phases(stage.program.graph_module, stage.program) for stage in staged.stages}
    for stage in staged.stages:
        items = {item.node: item for item in stage.program.inputs}
        nodes = [items[node.name] for node in phases[stage.index][0].graph.nodes if node.op == "placeholder"]
        given = [sent[it.name] if it.kind is InputKind.ARRIVING else named[it.kind, it.name] for it in nodes]
        outputs = Strided(phases[stage.index][0]).run(*given, enable_io_processing=False)
        early = [output for output in stage.program.outputs if output.kind is not OutputKind.GRADIENT]
        for output, value in zip(early, outputs, strict=False):
            (sent if output.kind is OutputKind.LEAVING else results)[
                output.name if output.kind is OutputKind.LEAVING else (output.kind, output.name)
            ] = value
        kept[stage.index] = list(outputs[len(early) :])
    for stage in reversed(staged.stages):
        backward = phases[stage.index][1]
        if backward is None:
            continue
        items = {item.node: item for item in stage.program.inputs if item.kind is InputKind.TANGENT}
        given = []
        for node in [node for node in backward.graph.nodes if node.op == "placeholder"]:
            item = items.get(node.name)
            if item is None:
                given.append(kept[stage.index].pop(0))
            else:
                given.append(sent["back", item.name] if is_boundary(item.name) else named[item.kind, item.name])
        late = [output for output in stage.program.outputs if output.kind is OutputKind.GRADIENT]
        for output, value in zip(late, Strided(backward).run(*given, enable_io_processing=False), strict=True):
            if output.is_between_stages:
                sent["back", output.name] = value
            else:
                key = output.kind, output.name
                results[key] = results[key] + value if key in results else value
    return results


def check(made: Any, stages: int) -> StagedProgram:
    program, values = captured(made)
    staged = cut(program, stages)
    with torch.no_grad():
        expected = Strided(program.graph_module).run(*(values[item.node] for item in program.inputs))
        actual = run_stages(staged, {(item.kind, item.name): values[item.node] for item in program.inputs})
    for output, wanted in zip(program.outputs, expected, strict=True):
        torch.testing.assert_close(actual[output.kind, output.name], wanted, rtol=1e-5, atol=1e-7)
    return staged


@pytest.mark.parametrize("stages", [3])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "vit", "resnet", "bert"])
def test_stages_compute_what_the_program_computes(name: str, stages: int) -> None:
    staged = check(MODELS[name](), stages)
    counts = [sum(node.op == "call_function" for node in it.program.graph_module.graph.nodes) for it in staged.stages]
    assert max(counts) < 0.75 * sum(counts)


@pytest.mark.parametrize("name", ["unet", "translator", "adapters", "dropout_transformer"])
def test_skip_connections_and_other_graphs(name: str) -> None:
    for stages in (2, 3):
        check(make_plain(name), stages)


def test_a_skip_connection_goes_straight_to_the_stage_that_reads_it() -> None:
    staged = check(make_plain("unet"), 4)
    assert (0, 3) in staged.activations and (0, 3) in staged.gradients


def test_a_tied_parameter_lives_on_both_stages_and_each_has_its_part_of_the_gradient() -> None:
    staged = check(MODELS["gpt2"](), 2)
    assert staged.shared == {"transformer.wte.weight": (0, 1)}
    sent = sum(staged.bytes[name] for name in staged.gradients[0, 1])
    assert sent < 50_257 * 32  # no part of the gradient of the embedding goes to the other stage with a microbatch


def test_what_goes_back_over_a_cut_is_what_went_forward() -> None:
    for name in ("gpt2", "bert", "vit"):
        program, _ = captured(MODELS[name]())
        staged = cut(program, 2)
        forward, backward = (
            sum(staged.bytes[it] for it in found[0, 1]) for found in (staged.activations, staged.gradients)
        )
        assert backward <= forward


def test_frozen_stages_send_nothing_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    for parameter in (*model[0].parameters(), *model[1].parameters()):
        parameter.requires_grad_(False)
    staged = check((model, (torch.randn(4, 8),)), 2)
    assert not staged.gradients
    assert [output.name for output in staged.stages[0].program.outputs if output.kind is OutputKind.GRADIENT] == []
