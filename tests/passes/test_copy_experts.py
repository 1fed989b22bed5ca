"""Copies of experts on virtual ranks: training is that of one device, whatever is copied where."""

from __future__ import annotations

import copy
import random
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.arguments import make_options
from autopar.capture.program import Program
from autopar.capture.trace import capture
from autopar.mesh import Mesh
from autopar.nn import Experts, MixtureOfExperts, Routing, SwitchGate, TopKGate
from autopar.passes.copy_experts import copy_experts, with_places
from autopar.passes.expert_places import ExpertPlaces, routes_of
from autopar.passes.pipeline import LocalProgram
from autopar.planner.liveness import predicted_timeline
from autopar.planner.make import plan_program
from autopar.runtime.memory_tracker import LockstepMemory
from autopar.sharding.assignment import Assignment
from tests.passes.filecheck import check
from tests.passes.hand_plans import S0, R, assigned
from tests.passes.running import Step, emit_all

WIDTH, EXPERTS, TOKENS = 8, 8, 24
LAYERS = {"first.experts": ("gate_up_proj", "down_proj"), "second.experts": ("up_proj", "down_proj")}
CASES = [  # mesh, layout of the tokens, axes along which experts lie
    ((4,), "A", (0,)),
    ((8,), "A", (0,)),
    ((2, 2), "A,A", (0, 1)),
    ((2, 4), "S0,A", (1,)),  # data parallel beside
    ((4, 2), "A,I", (0,)),  # every expert cut inside, too
]


class Model(nn.Module):
    """Two layers of experts in float64. `push`: how alike the tokens are; with much of it all choose the same experts,
    and the others get none."""

    def __init__(self, push: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = MixtureOfExperts(TopKGate(WIDTH, EXPERTS, 2), Experts(EXPERTS, WIDTH, 12))
        self.second = MixtureOfExperts(
            SwitchGate(WIDTH, EXPERTS, jitter=0.0, router_dtype=None), Experts(EXPERTS, WIDTH, 6, activation="gelu")
        )
        self.register_buffer("ramp", push * torch.linspace(1, 0, WIDTH))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            out, aux_loss = layer(x + self.ramp)
            x = x + out + aux_loss
        return x.square().mean()


def planned(model: nn.Module, x: Tensor, mesh: tuple[int, ...], layout: str) -> tuple[Program, Assignment]:
    program = capture(model, (x,), {})
    options = make_options("ilp", None, None, {"*/autopar.experts*": layout}, None, None)
    return program, plan_program(program, Mesh(mesh), options).assignment


def anywhere(mesh: tuple[int, ...], axes: tuple[int, ...], replicas: int, seed: int) -> ExpertPlaces:
    """Each expert owned and computed anywhere: by its owner, by others alone, twice by one group."""
    dice, groups = random.Random(seed), prod(mesh[axis] for axis in axes)
    slots = [*range(EXPERTS), *dice.choices(range(EXPERTS), k=replicas - EXPERTS)]
    experts = dice.sample(range(EXPERTS), EXPERTS)
    dice.shuffle(slots)
    size = replicas // groups
    computed = tuple(tuple(sorted(slots[start : start + size])) for start in range(0, replicas, size))
    return ExpertPlaces(tuple(experts), computed, axes)


@pytest.mark.parametrize("push", [1.0, 10.0])
@pytest.mark.parametrize(("mesh", "layout", "axes"), CASES)
def test_training_with_copies_is_that_of_one_device(
    mesh: tuple[int, ...], layout: str, axes: tuple[int, ...], push: float
) -> None:
    single, twin = Model(push), Model(push)
    program, assignment = planned(single, tokens(0), mesh, layout)
    programs = emit_all(program, assignment)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9) for model in (single, twin)]
    for step in range(4):  # placed anew in each
        places = {layer: anywhere(mesh, axes, 16 if step % 2 else 24, 10 * step + len(layer)) for layer in LAYERS}
        found = step_with_copies(
            twin, tokens(step), [with_places(local, places) for local in programs], assignment, places
        )
        loss = single(tokens(step))
        loss.backward()
        expected = {name: parameter.grad for name, parameter in single.named_parameters()}
        scale = max(float(grad.abs().max()) for grad in expected.values() if grad is not None)
        torch.testing.assert_close(found.pop("output"), loss.detach(), rtol=1e-9, atol=0)
        for name, parameter in twin.named_parameters():
            parameter.grad = found.pop(name)
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-11 * scale)
        for name, value in found.items():
            torch.testing.assert_close(value, single.get_buffer(name), rtol=0, atol=0)
            twin.get_buffer(name).copy_(value)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert (single.first.expert_load.max() == 4 * TOKENS) == (push > 1)  # all tokens to one expert


def step_with_copies(
    model: nn.Module, x: Tensor, programs: list[LocalProgram], assignment: Assignment, places: dict[str, ExpertPlaces]
) -> dict[str, Tensor]:
    """One step's results by name, in the model's order of experts."""
    moved = copy.deepcopy(model)
    rows = {f"{layer}.{name}": torch.tensor(where.experts) for layer, where in places.items() for name in LAYERS[layer]}
    with torch.no_grad():
        for name, experts in rows.items():
            moved.get_parameter(name).copy_(model.get_parameter(name)[experts])
    found = {name: value for (_, name), value in Step(moved, (x,), programs, assignment).run().items()}
    return {name: value[rows[name].argsort()] if name in rows else value for name, value in found.items()}


def tokens(seed: int) -> Tensor:
    return torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_where_every_rank_has_all_tokens_each_computes_its_slots() -> None:
    model = Model(1.0)
    program = capture(model, (tokens(0),), {})
    shards = {f"{layer}.{name}": S0 for layer, names in LAYERS.items() for name in names}
    assignment = assigned(program, R, shards)
    programs = emit_all(program, assignment)
    assert not any("all_to_all" in str(node.target) for node in programs[0].forward.graph.nodes)
    places = {layer: anywhere((2,), (0,), 12, len(layer)) for layer in LAYERS}
    with_copies = [with_places(local, places) for local in programs]
    assert all("sum_copies" in str(local.backward and local.backward.graph) for local in with_copies)
    found = step_with_copies(model, tokens(0), with_copies, assignment, places)
    loss = model(tokens(0))
    loss.backward()
    torch.testing.assert_close(found["output"], loss.detach(), rtol=1e-9, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12)


class Even(nn.Module):
    """Experts chosen in turn, one for each token; weights outweigh all else."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(EXPERTS, WIDTH, 64)

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(len(x)).remainder(EXPERTS)[:, None]
        scores = torch.ones(len(x), 1, dtype=x.dtype)
        out: Tensor = self.experts(x, Routing(index, scores, x.new_zeros(()), index.new_zeros(()), len(x)))
        return out.square().mean()


@pytest.mark.parametrize("count", [32, 512])
def test_copies_take_the_memory_that_is_predicted(count: int) -> None:
    """Neither the peak nor its rise is above what is predicted, nor more than 5 % below."""
    model, x = Even(), torch.randn(count, WIDTH)
    program, assignment = planned(model, x, (4,), "A")
    places = ExpertPlaces(tuple(range(8)), ((0, 1, 2, 3), (2, 3, 4, 5), (4, 5, 6, 7), (0, 1, 6, 7)), (0,))
    plain = emit_all(program, assignment)
    predicted, measured = list[list[int]](), list[tuple[int, ...]]()
    for programs in (plain, [with_places(local, {"experts": places}) for local in plain]):
        memory = LockstepMemory(4)
        Step(model, (x,), programs, assignment).run(memory)
        measured.append(memory.peak_bytes)
        predicted.append([predicted_timeline(local).peak_bytes for local in programs])
        assert all(seen <= told <= 1.05 * seen for seen, told in zip(measured[-1], predicted[-1], strict=True))
    for told, seen in zip(zip(*predicted, strict=True), zip(*measured, strict=True), strict=True):
        assert 0 < seen[1] - seen[0] <= told[1] - told[0] <= 1.05 * (seen[1] - seen[0])


def test_weights_are_fetched_before_each_op_and_gradients_go_back() -> None:
    program, assignment = planned(Model(1.0), tokens(0), (4,), "A")
    places = {"first.experts": anywhere((4,), (0,), 16, 1)}
    local = with_places(emit_all(program, assignment)[0], places)
    exchange = "CHECK: index_select\nCHECK: all_to_all_single.default\nCHECK: wait_tensor\n"
    check(local.forward, 2 * exchange + "CHECK: autopar.experts\nCHECK-NOT: expert_places_of\nCHECK: autopar.experts")
    assert local.backward is not None
    returned = "CHECK: all_to_all_single.default\nCHECK: sum_copies.default\n"
    check(local.backward, 2 * exchange + "CHECK: autopar.experts_backward\n" + 2 * returned)


def test_without_copies_and_along_other_axes_nothing_is_fetched() -> None:
    program, assignment = planned(Model(1.0), tokens(0), (4,), "A")
    local = emit_all(program, assignment)[0]
    owned = ExpertPlaces(tuple(range(8)), ((0, 1), (2, 3), (4, 5), (6, 7)), (0,))
    elsewhere = anywhere((2, 2), (0, 1), 16, 1)
    for places in (owned, elsewhere):
        by_layer = dict.fromkeys(LAYERS, places)
        assert copy_experts(local.forward, by_layer, local.geometry).code == local.forward.code


@given(
    mesh=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    replicas=st.integers(0, 8),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_every_group_gets_what_it_computes_once(mesh: list[int], replicas: int, seed: int, data: st.DataObject) -> None:
    axes = tuple(sorted(data.draw(st.sets(st.sampled_from(range(len(mesh))), min_size=1))))
    groups = prod(mesh[axis] for axis in axes)
    dice = random.Random(seed)
    experts = tuple(dice.sample(range(2 * groups), 2 * groups))
    computed = tuple(tuple(dice.choices(experts, k=2 + replicas)) for _ in range(groups))
    routes = routes_of(ExpertPlaces(experts, computed, axes), tuple(mesh))
    for group, wanted in zip(product(*(range(mesh[axis]) for axis in axes)), computed, strict=True):
        assert sorted(routes.arrived[group]) == sorted(set(wanted))
        for hop in routes.hops[group]:
            assert sum(hop.sent) == len(hop.rows) and len(hop.sent) == len(hop.coming) == mesh[hop.axis]
