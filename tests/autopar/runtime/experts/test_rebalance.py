"""Experts that move between steps: training, checkpoints and optimizers go on as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import UnsupportedOptionError
from autopar.nn import Experts, MixtureOfExperts, TopKGate
from autopar.passes.expert_places import ExpertPlaces
from autopar.runtime.experts.rebalance import Movable, decide, imbalance_of, read_decision
from tests.gloo import run_on_ranks

WIDTH, EXPERTS, RATE = 8, 8, 1e-2
BY_TOKENS = {"*/autopar.experts*": "A"}
Factory = Callable[[Any], torch.optim.Optimizer]


class Model(nn.Module):
    """Two layers of experts, float64; the first has a router that prefers the first experts by far."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.first = MixtureOfExperts(TopKGate(WIDTH, EXPERTS, 2), Experts(EXPERTS, WIDTH, 12))
        self.second = MixtureOfExperts(TopKGate(WIDTH, EXPERTS, 2), Experts(EXPERTS, WIDTH, 6, activation="gelu"))
        self.double()

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = self.dense(x)
        for layer in (self.first, self.second):
            out, aux_loss = layer(x + bias)
            x = x + out + aux_loss
        return x.square().mean()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens around one point, so that some experts are chosen much more than others; another point from step 4 on."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, WIDTH, dtype=torch.float64, generator=generator)
    point = torch.randn(WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step // 4))
    return x, point


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


@dataclass
class Pair:
    """The module on ranks and the model on one device, trained side by side."""

    pmodel: autopar.ParallelModule
    twin: nn.Module
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer]
    worst: float = 0.0  # relative error of a loss

    def train(self, steps: range) -> None:
        for step in steps:
            losses = []
            for module, optimizer in zip((self.pmodel, self.twin), self.optimizers, strict=True):
                loss = module(*batch(step))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            self.worst = max(self.worst, abs(losses[0] / losses[1] - 1))

    def gap(self) -> float:
        """The largest difference in the state_dict of the modules and of the optimizers, to the largest value."""
        states = [self.pmodel.state_dict(), self.twin.state_dict()]
        first, second = ({name: full(value) for name, value in state.items()} for state in states)
        assert first.keys() == second.keys()
        gaps = [distance(first[name], second[name]) for name in first]
        ours, theirs = (optimizer.state_dict()["state"] for optimizer in self.optimizers)
        for key, state in theirs.items():
            gaps += [distance(full(ours[key][name]), value) for name, value in state.items()]
        return max(gaps)


def distance(found: Any, expected: Any) -> float:
    if not isinstance(expected, Tensor):
        return 0.0 if found == expected else 1.0
    scale = float(expected.double().abs().max()) or 1.0
    return float((found.double() - expected.double()).abs().max()) / scale


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def pair(mesh_shape: tuple[int, ...], layout: str, factories: tuple[Factory, Factory]) -> Pair:
    model = Model()
    mesh = init_device_mesh("cpu", mesh_shape)
    pmodel = autopar.compile(model, mesh, example_inputs=batch(0), constraints={"*/autopar.experts*": layout})
    twin = copy.deepcopy(model)
    return Pair(pmodel, twin, (factories[0](pmodel.parameters()), factories[1](twin.parameters())))


def train_and_rebalance(mesh_shape: tuple[int, ...], layout: str) -> dict[str, Any]:
    found = pair(mesh_shape, layout, (adam, adam))
    found.train(range(3))
    gaps = [found.gap()]
    before = found.pmodel.expert_load
    moved = found.pmodel.rebalance()
    gaps.append(found.gap())
    again = found.pmodel.rebalance()
    after = found.pmodel.expert_load
    found.train(range(3, 6))
    gaps.append(found.gap())
    found.pmodel.reset_expert_load()
    found.train(range(6, 8))
    second = found.pmodel.rebalance()
    found.train(range(8, 9))
    gaps.append(found.gap())
    return {
        "gaps": gaps,
        "loss": found.worst,
        "counts": [dict(item.counts) for item in (before, after)],
        "loads": [dict(item.imbalance) for item in (before, after)],
        "moved": moved,
        "again": again,
        "second": second,
        "resumed": resumed(found),
    }


def resumed(found: Pair) -> list[float]:
    """How far a step from this checkpoint is from the twin's: of itself, of a single device, of a fresh module."""
    saved = {name: full(value).clone() for name, value in found.pmodel.state_dict().items()}
    optimizer = found.optimizers[0].state_dict()
    whole = {key: {name: full(value) for name, value in state.items()} for key, state in optimizer["state"].items()}
    single = Model()
    single.load_state_dict(saved)
    alone = adam(single.parameters())
    alone.load_state_dict({**optimizer, "state": copy.deepcopy(whole)})
    fresh = autopar.compile(
        Model(), found.pmodel.mesh, example_inputs=batch(0), constraints={"*/autopar.experts*": "A"}
    )
    fresh.load_state_dict(found.pmodel.state_dict())
    own = adam(fresh.parameters())
    own.load_state_dict(optimizer)
    found.pmodel.load_state_dict(found.pmodel.state_dict())
    found.optimizers[0].load_state_dict(copy.deepcopy(optimizer))
    found.train(range(9, 10))
    expected = found.twin.state_dict()
    errors = [found.gap()]
    for module, other in ((single, alone), (fresh, own)):
        module(*batch(9)).backward()
        other.step()
        errors.append(max(distance(full(value), expected[name]) for name, value in module.state_dict().items()))
    return errors


@pytest.mark.parametrize(("ranks", "mesh", "layout"), [(2, (2,), "A")])
def test_training_goes_on_as_on_one_device_after_experts_moved(ranks: int, mesh: tuple[int, ...], layout: str) -> None:
    results = run_on_ranks(train_and_rebalance, ranks, mesh, layout)
    for name in ("moved", "again", "second"):
        assert all(str(result[name]) == str(results[0][name]) for result in results)
    for found in results:
        assert max(*found["gaps"], found["loss"], *found["resumed"]) < 1e-9, found
        moved, again, second = found["moved"], found["again"], found["second"]
        assert moved.moved_experts > 0 and moved.moved_bytes > 0 and second.moved_experts > 0
        assert all(moved.imbalance_after[layer] <= moved.imbalance_before[layer] for layer in moved.before)
        assert sum(moved.imbalance_after.values()) < sum(moved.imbalance_before.values())
        assert (again.moved_experts, again.moved_bytes) == (0, 0)
        counts, loads = found["counts"], found["loads"]
        assert all(torch.equal(counts[0][layer], counts[1][layer]) for layer in counts[0])  # in the model's numbers
        assert loads == [dict(moved.imbalance_before), dict(moved.imbalance_after)]


def message_of(action: Callable[[], object]) -> str:
    try:
        action()
    except UnsupportedOptionError as error:
        return str(error)
    return "nothing was refused"


def refusals() -> dict[str, Any]:
    found = pair((2,), "A", (autopar.optim.SM3, autopar.optim.SM3))
    messages = {"no gradients yet": "", "stateless": str(found.pmodel.rebalance().moved_bytes)}
    found.train(range(2))
    with found.pmodel.no_sync():
        messages["no_sync"] = message_of(found.pmodel.rebalance)
    quantized = momentum(found.pmodel.parameters())
    weight = found.pmodel.first.experts.down_proj
    quantized.state[weight]["scales"] = torch.zeros(5)
    found.pmodel.attach_optimizer(quantized)
    messages["state"] = message_of(found.pmodel.rebalance)
    del quantized.state[weight]["scales"]
    loss, _ = found.pmodel(*batch(2)), found.twin(*batch(2))
    moved = found.pmodel.rebalance()
    try:
        loss.backward()
    except RuntimeError as error:
        messages["old backward"] = str(error)
    found.train(range(2, 4))
    late = momentum(found.pmodel.parameters())
    late.load_state_dict({"state": {index: {"momentum_buffer": value.detach().clone()} for index, value in enumerate(
        found.pmodel.parameters())}, "param_groups": late.state_dict()["param_groups"]})  # fmt: skip
    messages["late"] = message_of(late.step)
    return messages | {"moved": moved, "gap": found.gap()}


def test_what_could_not_follow_a_move_is_refused_and_sm3_follows() -> None:
    for found in run_on_ranks(refusals, 2):
        assert found["stateless"] == "0"  # nothing was counted yet, so nothing is moved
        assert "not yet summed" in found["no_sync"]
        assert "state 'scales' of SGD is of shape (5,)" in found["state"]
        assert "modified by an inplace operation" in found["old backward"]
        assert "attach_optimizer" in found["late"]
        assert found["moved"].moved_experts > 0 and found["gap"] < 1e-9


class Regularized(nn.Module):
    """Its loss reads the weights of the experts otherwise than as experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MixtureOfExperts(TopKGate(WIDTH, 4, 2), Experts(4, WIDTH, 6))

    def forward(self, x: Tensor) -> Tensor:
        out, aux_loss = self.layer(x)
        ramp = torch.arange(4.0)[:, None, None]
        loss: Tensor = out.square().mean() + aux_loss + (self.layer.experts.down_proj * ramp).sum()
        return loss


def refusals_of_layers() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    x, dense = torch.randn(8, WIDTH), nn.Linear(WIDTH, 2)
    found = [message_of(autopar.compile(dense, mesh, example_inputs=x).rebalance)]
    for layout in ("R", "A"):
        constraints = {"*/autopar.experts*": layout}
        found.append(
            message_of(autopar.compile(Regularized(), mesh, example_inputs=x, constraints=constraints).rebalance)
        )
    return found


def test_layers_that_cannot_be_moved_are_refused_with_the_reason() -> None:
    nothing, whole, read = run_on_ranks(refusals_of_layers, 2)[0]
    assert "there is no layer of experts" in nothing
    assert "'layer.experts.down_proj' is also read by aten.mul.Tensor at test_rebalance.py" in whole
    assert read == whole


def test_layers_of_one_size_are_placed_together_and_balanced_ones_are_left_alone() -> None:
    places = ExpertPlaces((0, 1, 2, 3), ((0, 1), (2, 3)), (0,))
    items = [
        Movable(("a",), (9.0, 8.0, 1.0, 2.0), places),
        Movable(("b",), (5.0, 5.0, 5.0, 5.0), places),
        Movable(("c",), (0.0, 0.0, 7.0, 7.0), places),
    ]
    asked = []

    def swap(load: Any, current: Any) -> Any:
        asked.append((list(load), list(current)))
        return [(it, it) for it in (((0, 3), (1, 2)), ((0, 2), (1, 3)))]

    decided = read_decision(decide(items, swap, None), items)
    assert asked == [([items[0].load, items[2].load], [places, places])]
    assert [it.experts for it in decided] == [(0, 3, 2, 1), (0, 1, 2, 3), (0, 2, 1, 3)]
    assert all(it.computed == it.owned for it in decided)
    assert imbalance_of(items[0].load, decided[0].computed) == 1.1 and imbalance_of((0.0,) * 4, places.computed) == 1.0
