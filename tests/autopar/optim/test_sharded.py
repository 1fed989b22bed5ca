"""Sharded parameters: every optimizer computes what it computes on one device, in every layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from autopar.optim import SM3, Adafactor, Adam8bit, HostState, ShardedState
from autopar.runtime.parameters import lay_out_anew, lay_out_optimizer_state
from autopar.sharding.layout import parse_layout
from tests.gloo import run_on_ranks

SHAPES = [(10, 12), (96, 64), (128, 64), (9000,), (3, 40, 50), ()]
LAYOUTS = ["S0", "S1", "R", "S0,S1", "S1,S0", "S0,S0", "R,S1"]
Factory = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Factory, float]] = {  # with the largest difference allowed
    "SM3": (partial(SM3, lr=0.1, weight_decay=0.01), 0.0),
    "Adam8bit": (partial(Adam8bit, lr=0.01, weight_decay=0.01), 0.0),
    "Adafactor": (partial(Adafactor, lr=0.1), 1e-6),
    "sharded SGD": (partial(ShardedState, optimizer=torch.optim.SGD, lr=0.1, momentum=0.9), 1e-7),
    "sharded Adam8bit": (partial(ShardedState, optimizer=Adam8bit, lr=0.01), 0.0),
}


def stepped(factory: Factory, parameters: list[torch.nn.Parameter], place: Callable[..., torch.Tensor]) -> int:
    """Two steps; the bytes of the state that this rank holds."""
    torch.manual_seed(1)
    optimizer = factory(parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = place(torch.randn(parameter.shape), parameter)
        optimizer.step()
    held = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    return sum(value.to_local().nbytes if isinstance(value, DTensor) else value.nbytes for value in held)


def differences() -> dict[tuple[str, str], tuple[float, int]]:
    """By optimizer and layout: the largest difference to one device, relative to the largest weight; state bytes."""
    meshes = {1: init_device_mesh("cpu", (4,)), 2: init_device_mesh("cpu", (2, 2))}
    torch.manual_seed(0)
    weights = [torch.randn(shape) for shape in SHAPES]
    found = {}
    for name, (factory, _) in OPTIMIZERS.items():
        alone = [torch.nn.Parameter(weight.clone()) for weight in weights]
        stepped(factory, alone, lambda gradient, _: gradient)
        for text in LAYOUTS:
            mesh = meshes[text.count(",") + 1]
            layouts = [layout_for(text, shape) for shape in SHAPES]
            cut = [
                torch.nn.Parameter(distribute_tensor(weight.clone(), mesh, parse_layout(layout, mesh.ndim)))
                for weight, layout in zip(weights, layouts, strict=True)
            ]
            held = stepped(factory, cut, lambda grad, like: distribute_tensor(grad, like.device_mesh, like.placements))
            pairs = zip(cut, alone, strict=True)
            worst = max(float((item.full_tensor() - other).abs().max() / other.abs().max()) for item, other in pairs)
            found[name, text] = worst, held
    return found


def layout_for(text: str, shape: tuple[int, ...]) -> str:
    """The layout, without cuts of dims that a tensor of that shape does not have."""
    words = text.split(",")
    return ",".join(word if word == "R" or int(word[1:]) < len(shape) else "R" for word in words)


def test_sharded_parameters_are_updated_as_on_one_device() -> None:
    ranks = run_on_ranks(differences, 4)
    for found in ranks:
        for (name, text), (worst, _) in found.items():
            assert worst <= OPTIMIZERS[name][1], f"{name} on {text}: {worst}"


def test_the_state_is_cut_as_the_parameter_is() -> None:
    held = run_on_ranks(state_bytes, 4)[0]
    assert held["SM3"] == 4 * (256 + 512 // 4 + 256 * 512 // 4)
    assert held["Adam8bit"] == 2 * (256 * 512 // 4 + 4 * 256 * 512 // 2048)  # columns: all ranks hold all scales
    assert held["sharded SGD"] == 4 * 256 * 512 // 4
    assert held["Adafactor"] == 4 * (256 + 512 // 4)


def state_bytes() -> dict[str, int]:
    """Of a matrix that is cut over its columns."""
    mesh, found = init_device_mesh("cpu", (4,)), {}
    for name, (factory, _) in OPTIMIZERS.items():
        weight = distribute_tensor(torch.randn(256, 512), mesh, parse_layout("S1", 1))
        place = lambda grad, like: distribute_tensor(grad, like.device_mesh, like.placements)  # noqa: E731
        found[name] = stepped(factory, [torch.nn.Parameter(weight)], place)
    assert math.prod(weight.shape) == 256 * 512
    return found


def laid_out_anew() -> list[float]:
    """A parameter moves to another layout between steps, as at a first call that plans; its optimizer goes on."""
    mesh = init_device_mesh("cpu", (2, 2))
    weight, gradients = torch.randn(96, 64), torch.randn(4, 96, 64)
    found = []
    hosted = partial(HostState, optimizer=torch.optim.AdamW)
    for factory in (partial(ShardedState, optimizer=torch.optim.AdamW), SM3, Adam8bit, hosted):
        alone = torch.nn.Parameter(weight.clone())
        cut = torch.nn.Parameter(distribute_tensor(weight.clone(), mesh, parse_layout("S0,S0", 2)))
        first, second = factory([alone]), factory([cut])
        for step, gradient in enumerate(gradients):
            if step == 2:
                lay_out_anew(cut, parse_layout("R,S1", 2))
                lay_out_optimizer_state(second)
            alone.grad, cut.grad = gradient.clone(), distribute_tensor(gradient, mesh, cut.placements)
            first.step()
            second.step()
        found.append(float((cut.full_tensor() - alone).abs().max()))
    return found


def test_state_follows_a_parameter_that_is_laid_out_anew() -> None:
    for found in run_on_ranks(laid_out_anew, 4):
        assert max(found) < 1e-6
