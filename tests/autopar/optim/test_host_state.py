"""Optimizer state on the host: what is computed stays the same bit by bit, and the device holds little of it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.errors import UnsupportedOptionError
from autopar.optim import SM3, Adafactor, Adam8bit, HostState, ShardedState
from autopar.optim.cut import local_of
from autopar.optim.sharded_state import _moved
from autopar.runtime.experts.optimizers import OptimizerWatch
from autopar.runtime.memory_tracker import MemoryTracker
from autopar.runtime.parameters import lay_out_anew, lay_out_optimizer_state
from autopar.sharding.layout import format_layout, parse_layout
from tests.gloo import run_on_ranks

Factory = Callable[..., torch.optim.Optimizer]
SHAPES = [(64, 80), (30, 4), (7,), ()]
OPTIMIZERS: dict[str, Factory] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, amsgrad=True),
    "Adagrad": torch.optim.Adagrad,  # keeps state from the start
    "RAdam": torch.optim.RAdam,
    "torch's Adafactor": torch.optim.Adafactor,
    "Adafactor": Adafactor,
    "SM3": SM3,
    "Adam8bit": Adam8bit,
}


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def step(optimizer: torch.optim.Optimizer, items: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for item in items:
        item.grad = torch.randn(item.shape)
    optimizer.step()


def groups(items: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": items[:1]}, {"params": items[1:], "weight_decay": 0.1}]


class Copies(TorchDispatchMode):
    """Counts the bytes that are copied to the host and back."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = {"offload": 0, "reload": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1]
        if name in self.bytes:
            self.bytes[name] += args[0].nbytes
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_computes_what_it_computes_without(name: str) -> None:
    factory, plain, hosted = OPTIMIZERS[name], parameters(), parameters()
    first, second = factory(groups(plain)), HostState(groups(hosted), factory)
    for seed in range(3):
        for group in (*first.param_groups, *second.param_groups):
            group["lr"] = 0.01 * (seed + 1)
        step(first, plain, seed)
        step(second, hosted, seed)
    assert all(torch.equal(one, other) for one, other in zip(plain, hosted, strict=True))
    before, after = first.state_dict(), second.state_dict()
    assert before["param_groups"] == after["param_groups"] and before["state"].keys() == after["state"].keys()
    for number, state in before["state"].items():
        assert state.keys() == after["state"][number].keys()
        assert all(torch.equal(torch.as_tensor(after["state"][number][key]), torch.as_tensor(value))
                   for key, value in state.items() if value is not None)  # fmt: skip


def test_state_goes_to_the_host_after_each_step_and_comes_back_for_the_next() -> None:
    items = parameters()
    optimizer = HostState(items, torch.optim.Adam)
    state_bytes = sum(2 * item.nbytes for item in items if item.dim())
    for seed in range(3):
        with Copies() as copies:
            step(optimizer, items, seed)
        assert copies.bytes == {"offload": state_bytes, "reload": state_bytes if seed else 0}


def test_the_device_holds_the_state_of_two_parameters_at_most() -> None:
    items = [nn.Parameter(torch.randn(64, 64)) for _ in range(8)]
    one, state_bytes = items[0].nbytes, 2 * items[0].nbytes
    optimizer = HostState(items, partial(torch.optim.Adam, foreach=False))
    with MemoryTracker() as memory:
        memory.hold(items)
        for seed in range(3):
            step(optimizer, items, seed)
            memory.reset_peak()
        held = memory.live_bytes
        assert memory.host_bytes == 8 * state_bytes and held <= 8 * 2 * one + 1024  # gradients, numbers of steps
        optimizer.step()
        assert memory.live_bytes == held and memory.host_bytes == 8 * state_bytes
        assert memory.peak_bytes == held + 2 * state_bytes  # `step` makes two tensors more, when one state is there


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    items = parameters()
    optimizer = HostState(items, torch.optim.Adam)
    step(optimizer, items, 0)
    kept, before = dict(optimizer.state[items[0]]), items[0].detach().clone()
    items[0].grad = None
    optimizer.step()
    assert torch.equal(items[0], before) and optimizer.state[items[0]] == kept


@pytest.mark.parametrize("saved_by", ["itself", "the optimizer inside"])
def test_a_saved_state_goes_on_where_it_was(saved_by: str) -> None:
    plain, hosted, fresh = parameters(), parameters(), parameters()
    adam = partial(torch.optim.AdamW, lr=0.05)
    first, second = adam(groups(plain)), HostState(groups(hosted), adam)
    for seed in range(2):
        step(first, plain, seed)
        step(second, hosted, seed)
    third = HostState(groups(fresh), torch.optim.AdamW)
    for item, value in zip(fresh, plain, strict=True):
        item.data.copy_(value)
    third.load_state_dict(deepcopy((second if saved_by == "itself" else first).state_dict()))
    first.load_state_dict(deepcopy(second.state_dict()))
    for seed in (2, 3):
        step(first, plain, seed)
        step(third, fresh, seed)
    assert third.param_groups[0]["lr"] == 0.05 and third.param_groups[1]["weight_decay"] == 0.1
    assert all(torch.equal(one, other) for one, other in zip(plain, fresh, strict=True))


def test_groups_may_be_added() -> None:
    plain, hosted = parameters(), parameters()
    first, second = torch.optim.Adam(plain[:2]), HostState(hosted[:2], torch.optim.Adam)
    for optimizer, items in ((first, plain), (second, hosted)):
        step(optimizer, items, 0)
        optimizer.add_param_group({"params": items[2:], "lr": 0.5})
        step(optimizer, items, 1)
    assert all(torch.equal(one, other) for one, other in zip(plain, hosted, strict=True))


class Normalized(torch.optim.SGD):
    """Divides by the norm of all gradients: what one parameter becomes depends on the others."""

    def step(self, closure: Any = None) -> Any:
        items = [item for group in self.param_groups for item in group["params"] if item.grad is not None]
        nn.utils.clip_grad_norm_(items, 1e-3)
        return super().step(closure)


@pytest.mark.parametrize(
    "factory", [torch.optim.LBFGS, Normalized, partial(ShardedState, optimizer=torch.optim.Adam)], ids=str
)
def test_an_optimizer_that_steps_all_parameters_at_once_is_refused(factory: Factory) -> None:
    with pytest.raises(UnsupportedOptionError, match="HostState"):
        HostState(parameters(), factory)


def on_ranks() -> list[tuple[str, bool, str, int]]:
    """On a mesh: which optimizer, whether it computed the same as without the host, on what its state lies, bytes."""
    mesh, found = init_device_mesh("cpu", (2, 2)), []
    pairs: dict[str, tuple[Factory, Factory]] = {
        "AdamW": (torch.optim.AdamW, partial(HostState, optimizer=torch.optim.AdamW)),
        "Adam8bit": (Adam8bit, partial(HostState, optimizer=Adam8bit)),
        "sharded": (
            partial(ShardedState, optimizer=torch.optim.AdamW),
            partial(ShardedState, optimizer=partial(HostState, optimizer=torch.optim.AdamW)),
        ),
    }
    for name, factories in pairs.items():
        values = []
        for factory in factories:
            torch.manual_seed(0)
            weight = distribute_tensor(torch.randn(96, 64), mesh, parse_layout("S0,R", 2))
            item = nn.Parameter(weight)
            optimizer = factory([item])
            for _ in range(3):
                item.grad = distribute_tensor(torch.randn(96, 64), mesh, weight.placements)
                optimizer.step()
            values.append(item.full_tensor())
        state: dict[str, Tensor] = optimizer.state[item]
        kept = [value for key, value in state.items() if key != "step"]
        held = sum(local_of(value).nbytes for value in kept)
        found.append((name, torch.equal(*values), str({local_of(value).device.type for value in kept}), held))
        assert all(isinstance(value, DTensor) for value in kept)
    return found


def test_shards_on_ranks_are_stepped_the_same() -> None:
    expected = {"AdamW": 2 * 48 * 64 * 4, "sharded": 2 * 24 * 64 * 4}
    for found in run_on_ranks(on_ranks, 4):
        for name, same, where, held in found:
            assert same and where == "{'cpu'}", name
            assert held == expected.get(name, held)


def laid_out_anew() -> list[str]:
    """Layouts of a state that lies elsewhere than its mesh, after its parameter was laid out anew."""
    mesh = init_device_mesh("cpu", (2,))
    item = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, parse_layout("S0", 1)))
    found = []
    for factory in (partial(HostState, optimizer=torch.optim.Adam), partial(ShardedState, optimizer=torch.optim.Adam)):
        optimizer = factory([item])
        elsewhere = torch.empty(4, 4, device="meta")
        value = DTensor.from_local(elsewhere, mesh, parse_layout("S0", 1), run_check=False)
        optimizer.state[item] = {"exp_avg": value}
        lay_out_anew(item, parse_layout("S1", 1))
        lay_out_optimizer_state(optimizer)
        found.append(format_layout(tuple(value.placements)))
        found.append(format_layout(tuple(_moved(value, item).placements)))
        lay_out_anew(item, parse_layout("S0", 1))
    return found


def test_state_that_lies_on_the_host_is_left_to_its_optimizer() -> None:
    for found in run_on_ranks(laid_out_anew, 2):
        assert found == ["S0"] * 4


def trained() -> list[float]:
    """Of a model that is planned at its first call: the largest difference to one without the host, after 3 steps."""
    mesh, weights = init_device_mesh("cpu", (4,)), []
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    for factory in (torch.optim.AdamW, partial(HostState, optimizer=torch.optim.AdamW)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        pmodel = autopar.compile(model, mesh, search="fsdp", optimizer=factory)
        optimizer = factory(pmodel.parameters())
        for _ in range(3):
            pmodel(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append([item.full_tensor() for item in pmodel.parameters()])
    return [float((one - other).abs().max()) for one, other in zip(*weights, strict=True)]


def test_a_parallel_model_is_trained_the_same() -> None:
    for differences in run_on_ranks(trained, 4):
        assert max(differences) == 0.0


def test_a_plan_counts_the_state_on_the_host() -> None:
    model, x = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(512, 64)
    mesh = autopar.Mesh((2,), hardware="a100-80")
    plans = {
        name: autopar.make_plan(model, mesh, example_inputs=x, search="ddp", optimizer=factory)
        for name, factory in {
            "none": torch.optim.SGD,
            "adam": torch.optim.Adam,
            "host": partial(HostState, optimizer=torch.optim.Adam),
        }.items()
    }
    state_bytes = 2 * sum(item.nbytes for item in model.parameters())
    assert plans["adam"].peak_bytes == plans["none"].peak_bytes + state_bytes and plans["adam"].host_bytes == 0
    assert plans["host"].peak_bytes == plans["none"].peak_bytes and plans["host"].host_bytes == state_bytes
    assert plans["host"].step_s > plans["adam"].step_s + state_bytes / 64e9
    assert "on the host" in str(plans["host"]) and "on the host" not in str(plans["adam"])


def test_a_plan_counts_the_state_that_is_there_while_a_parameter_is_stepped() -> None:
    """Of a batch so small that the step holds more than the backward."""
    model, x = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)), torch.randn(2, 256)
    plan = autopar.make_plan(
        model, (1,), example_inputs=x, search="ddp", optimizer=partial(HostState, optimizer=torch.optim.Adam)
    )
    one = 256 * 256 * 4
    assert plan.peak_bytes >= 2 * one + 2 * one + 2 * 2 * one and plan.host_bytes == 2 * 2 * one


def test_experts_know_the_optimizer_once_and_refuse_to_take_its_state_along_from_the_host() -> None:
    watch, items = OptimizerWatch(), parameters()
    watch.parameters = {id(item): item for item in items}
    optimizer = HostState(items, torch.optim.Adam)
    step(optimizer, items, 0)
    assert set(watch.known) == {optimizer}
    elsewhere = nn.Parameter(torch.empty(64, 80, device="meta"))
    optimizer.state[elsewhere] = {"exp_avg": torch.zeros(64, 80)}
    assert len(watch.states(items[0])) == 2
    with pytest.raises(UnsupportedOptionError, match="on the host"):
        watch.states(elsewhere)
