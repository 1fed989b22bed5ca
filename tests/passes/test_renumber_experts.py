"""Moved experts: what is emitted reads their places, and computes what it did with the weights in their own order."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from autopar.capture.program import OutputKind
from autopar.capture.trace import capture
from autopar.nn import Experts, MixtureOfExperts, TopKGate
from autopar.passes.expert_places import ExpertPlaces
from autopar.passes.pipeline import LocalProgram
from autopar.passes.renumber_experts import renumber_experts
from tests.passes.filecheck import check
from tests.passes.hand_plans import S0, assigned
from tests.passes.running import Step, emit_all

LAYER, WEIGHTS = "layer.experts", ("layer.experts.up_proj", "layer.experts.down_proj")
ROWS = torch.tensor([2, 0, 3, 1])


class Model(nn.Module):
    """With a capacity that drops some choices, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        gate = TopKGate(8, 4, 2, capacity_factor=0.75)
        self.layer = MixtureOfExperts(gate, Experts(4, 8, 6, activation="gelu"))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out, aux_loss = self.layer(x)
        return out.square().mean() + aux_loss


def renumbered(local: LocalProgram, layer: str) -> LocalProgram:
    """Expert e of the layer in row ROWS[e]."""
    assert local.backward is not None
    experts = tuple(ROWS.argsort().tolist())
    places = {layer: ExpertPlaces(experts, (experts[:2], experts[2:]), (0,))}
    forward, backward = (renumber_experts(gm, places, local.geometry) for gm in (local.forward, local.backward))
    return replace(local, forward=forward, backward=backward)


def test_places_are_read_before_the_layer_and_before_its_backward() -> None:
    program = capture(Model(), (torch.randn(8, 8, dtype=torch.float64),), {})
    local = renumbered(emit_all(program, assigned(program, S0, {}))[0], LAYER)
    expected = """
        CHECK: expert_counts = autopar.expert_counts.default(where,
        CHECK: expert_places_default = autopar.expert_places.default(where, expert_places_of_experts, 0)
        CHECK: autopar.experts.default(reshape_6, expert_places_default,
    """
    check(local.forward, expected)
    assert local.backward is not None
    check(local.backward, "CHECK: autopar.expert_places.default(\nCHECK: autopar.experts_backward.default(")


def test_with_moved_weights_and_their_rows_everything_is_what_it_was() -> None:
    model, x = Model(), torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for name in WEIGHTS:
            moved.get_parameter(name)[ROWS] = model.get_parameter(name)
    program = capture(model, (x,), {})
    assignment = assigned(program, S0, {})
    programs = emit_all(program, assignment)
    expected = Step(model, (x,), programs, assignment).run()
    found = Step(moved, (x,), [renumbered(item, LAYER) for item in programs], assignment).run()
    assert found.keys() == expected.keys()
    for (kind, name), value in found.items():
        rows = ROWS if kind is OutputKind.GRADIENT and name in WEIGHTS else slice(None)
        value = value[rows] if value.dim() else value
        torch.testing.assert_close(value, expected[kind, name], rtol=1e-12, atol=1e-12)


class Pair(nn.Module):
    """Two layers of experts by one routing, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = TopKGate(8, 4, 2)
        self.first, self.second = (Experts(4, 8, 6, activation="gelu") for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        routing = self.gate(x)
        return (self.first(x, routing) + self.second(x, routing)).square().mean()


def test_layers_by_one_routing_send_their_tokens_apart_once_the_experts_of_one_have_moved() -> None:
    model, x = Pair(), torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights = tuple(f"{layer}.{name}" for layer in ("first", "second") for name in ("up_proj", "down_proj"))
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for name in weights[2:]:
            moved.get_parameter(name)[ROWS] = model.get_parameter(name)
    program = capture(model, (x,), {})
    assignment = assigned(program, S0, dict.fromkeys(weights, S0))
    programs = emit_all(program, assignment)
    trips = [node for node in programs[0].forward.graph.nodes if "expert_ranks" in str(node.target)]
    assert len(trips) == 2
    expected = Step(model, (x,), programs, assignment).run()
    found = Step(moved, (x,), [renumbered(item, "second") for item in programs], assignment).run()
    for (kind, name), value in found.items():
        rows = ROWS if kind is OutputKind.GRADIENT and name in weights[2:] else slice(None)
        value = value[rows] if value.dim() else value
        torch.testing.assert_close(value, expected[kind, name], rtol=1e-12, atol=1e-12)


def test_other_layers_stay_as_they_are() -> None:
    program = capture(Model(), (torch.randn(8, 8, dtype=torch.float64),), {})
    local = emit_all(program, assigned(program, S0, {}))[0]
    assert renumbered(local, "another").forward.code == local.forward.code
