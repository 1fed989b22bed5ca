"""Parameters on the host train as on the device: any optimizer, accumulated gradients, clipping, other shapes."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import autopar
from autopar.optim import SM3, Adafactor, Adam8bit, HostState, ShardedState
from autopar.runtime.memory_tracker import MemoryTracker
from autopar.sharding.dtensors import as_dtensor, to_host
from autopar.torch_compat import swap_content
from tests.autopar.runtime.models import mlp
from tests.gloo import run_on_ranks

HOST = {"*.weight": "offload"}
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "sm3": partial(SM3, lr=1e-2),
    "adafactor": partial(Adafactor, lr=1e-2),
    "adam8bit": partial(Adam8bit, lr=1e-2),
    "host state": partial(HostState, optimizer=torch.optim.AdamW, lr=1e-2),
}
DIVIDED: dict[str, Any] = {
    "stage 1": partial(ShardedState, optimizer=torch.optim.AdamW, lr=1e-2),
    "stage 2": partial(ShardedState, optimizer=torch.optim.AdamW, stage=2, lr=1e-2),
    "adafactor": partial(ShardedState, optimizer=Adafactor, lr=1e-2),
    "host state": partial(ShardedState, optimizer=partial(HostState, optimizer=torch.optim.AdamW), lr=1e-2),
}


def rows(seed: int, count: int = 8) -> Tensor:
    width = next(mlp().parameters()).shape[1]
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (module(x) ** 2).mean()
    return loss


def full(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_same(pmodel: nn.Module, model: nn.Module) -> None:
    for name, parameter in pmodel.named_parameters():
        torch.testing.assert_close(full(parameter), model.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


def train(search: str, optimizer: str, lazily: bool) -> None:
    model, mesh = mlp(), init_device_mesh("cpu", (2,))
    given: dict[str, Any] = {} if lazily else {"example_inputs": rows(0)}
    factory = {**OPTIMIZERS, **{f"divided {name}": item for name, item in DIVIDED.items()}}[optimizer]
    pmodel = autopar.compile(mlp(), mesh, search=search, constraints=HOST, optimizer=factory, **given)
    pmodel.load_state_dict(model.state_dict())
    own, other = factory(pmodel.parameters()), factory(model.parameters())
    for seed in range(4):
        for module, stepping in ((pmodel, own), (model, other)):
            stepping.zero_grad()
            loss_of(module, rows(seed, 8 if seed < 3 else 4)).backward()  # the last batch is smaller: another program
            autopar.clip_grad_norm_(pmodel, 0.5) if module is pmodel else nn.utils.clip_grad_norm_(
                module.parameters(), 0.5
            )
            stepping.step()
    assert {entry.key for entry in pmodel.plan.entries if entry.residency == "offload"}
    assert_same(pmodel, model)
    with torch.no_grad():
        torch.testing.assert_close(pmodel(rows(9)), model(rows(9)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_steps_parameters_on_the_host(optimizer: str) -> None:
    run_on_ranks(train, 2, "fsdp", optimizer, False)


@pytest.mark.parametrize("optimizer", DIVIDED)
def test_replicas_divide_the_state_of_parameters_on_the_host(optimizer: str) -> None:
    run_on_ranks(train, 2, "ddp", f"divided {optimizer}", optimizer == "stage 1")


def follow_a_parameter() -> None:
    """To the host and back, as far as a CPU can tell: to other memory, with other values."""
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Replicate()]))
    alone = nn.Parameter(torch.ones(4, 2))
    optimizer, other = DIVIDED["stage 1"]([parameter]), torch.optim.AdamW([alone], lr=1e-2)
    for step in range(3):
        parameter.grad = distribute_tensor(torch.full((4, 2), step + 1.0), mesh, [Replicate()])
        alone.grad = torch.full((4, 2), step + 1.0)
        optimizer.step(), other.step()
        held, parameter.grad = parameter.detach().to_local() / 2, None
        alone.data.div_(2)
        swap_content(parameter, as_dtensor(held, mesh, (Replicate(),), (4, 2)))
    torch.testing.assert_close(full(parameter), alone.detach(), rtol=1e-6, atol=1e-7)


def test_the_part_of_a_parameter_is_that_of_where_it_lies_now() -> None:
    run_on_ranks(follow_a_parameter, 2)


def test_replicas_and_lazy_modules_have_them_too() -> None:
    run_on_ranks(train, 2, "ddp", "adamw", True)


def accumulate() -> None:
    model, mesh = mlp(), init_device_mesh("cpu", (2,))
    pmodel = autopar.compile(mlp(), mesh, example_inputs=rows(0), search="ddp", constraints=HOST)
    pmodel.load_state_dict(model.state_dict())
    with pmodel.no_sync():
        loss_of(pmodel, rows(1)).backward()
    loss_of(pmodel, rows(2)).backward()
    for seed in (1, 2):
        loss_of(model, rows(seed)).backward()
    for name, parameter in pmodel.named_parameters():
        gradient, wanted = parameter.grad, model.get_parameter(name).grad
        assert gradient is not None and wanted is not None
        torch.testing.assert_close(full(gradient), wanted, rtol=1e-5, atol=1e-6)


def test_gradients_pile_up_on_the_host() -> None:
    run_on_ranks(accumulate, 2)


def save_and_load(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    pmodel = autopar.compile(mlp(), mesh, example_inputs=rows(0), search="fsdp", constraints=HOST)
    optimizer = torch.optim.AdamW(pmodel.parameters(), lr=1e-2)
    loss_of(pmodel, rows(1)).backward()
    optimizer.step()
    state, of_optimizer = get_state_dict(pmodel, optimizer)
    dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder)
    for constraints in ({}, HOST):
        fresh = autopar.compile(mlp(), mesh, example_inputs=rows(0), search="ddp", constraints=constraints)
        stepping = torch.optim.AdamW(fresh.parameters(), lr=1e-2)
        state, of_optimizer = get_state_dict(fresh, stepping)
        dcp.load({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder)
        set_state_dict(fresh, stepping, model_state_dict=state, optim_state_dict=of_optimizer)
        for name, parameter in fresh.named_parameters():
            torch.testing.assert_close(full(parameter), full(pmodel.get_parameter(name)), rtol=0, atol=0)


def test_checkpoints_load_with_and_without_a_host() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(save_and_load, 2, folder)


def hold_where_it_lies() -> None:
    """A mesh of GPUs that there are not: nothing may be brought to them."""
    mesh = DeviceMesh("cuda", [0], _init_backend=False)
    assert as_dtensor(torch.ones(4, 2), mesh, (Shard(0),), (4, 2)).to_local().device.type == "cpu"
    parameter = nn.Parameter(as_dtensor(torch.ones(4, 2), mesh, (Shard(0),), (4, 2)))
    parameter.grad = as_dtensor(torch.ones(4, 2), mesh, (Shard(0),), (4, 2))
    optimizer = HostState([parameter], torch.optim.AdamW)
    optimizer.step()
    for value in optimizer.state[parameter].values():
        assert not isinstance(value, DTensor) or value.to_local().device.type == "cpu"
    to_host(parameter)
    plain = torch.optim.AdamW([parameter])
    plain.step()
    assert plain.state[parameter]["exp_avg"].to_local().device.type == "cpu"


def test_what_lies_on_the_host_of_a_gpu_stays_there() -> None:
    run_on_ranks(hold_where_it_lies, 1)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> Tensor:
        ctx.mesh = x.device_mesh
        return torch.ones(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        return as_dtensor(torch.ones(4, 2), ctx.mesh, (Shard(0),), (4, 2))


def move_between_devices() -> None:
    mesh = DeviceMesh("cuda", [0], _init_backend=False)
    away = torch.zeros(4, 2, device="meta")
    parameter = nn.Parameter(as_dtensor(away, mesh, (Shard(0),), (4, 2)))
    optimizer, seen = torch.optim.SGD([parameter], lr=1.0), list[int]()
    parameter.register_post_accumulate_grad_hook(lambda _: seen.append(1))
    before = parameter
    swap_content(parameter, as_dtensor(torch.ones(4, 2), mesh, (Shard(0),), (4, 2)))
    assert parameter is before and parameter.device.type == "cpu" and parameter.requires_grad
    _Once.apply(parameter).backward()
    optimizer.step()
    assert seen == [1] and torch.equal(parameter.detach().to_local(), torch.zeros(4, 2))


def test_a_parameter_that_goes_to_another_device_keeps_its_hooks_and_its_optimizer() -> None:
    run_on_ranks(move_between_devices, 1)


def recorded() -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (2,))
    adamw = torch.optim.AdamW
    pmodel = autopar.compile(mlp(), mesh, example_inputs=rows(0), search="fsdp", constraints=HOST, optimizer=adamw)
    optimizer = adamw(pmodel.parameters())
    with pmodel.record() as recorder:
        for seed in range(4):
            optimizer.zero_grad()
            loss_of(pmodel, rows(seed)).backward()
            optimizer.step()
    peak, plan = recorder.recording.peak, pmodel.plan
    assert peak is not None and isinstance(plan, autopar.Plan)
    return peak.held_bytes, plan.peak_bytes


def test_a_recording_counts_what_the_device_holds() -> None:
    beside = rows(0).nbytes  # the batch is given whole
    for held, promised in run_on_ranks(recorded, 2):
        assert held <= promised + beside


def test_what_is_held_on_the_host_counts_apart() -> None:
    kept, away = torch.ones(10), torch.ones(20)
    with MemoryTracker() as memory:
        memory.hold([away], on_host=True)
        memory.hold([kept, away])
        assert (memory.live_bytes, memory.host_bytes) == (40, 80)
