"""Checkpoints: original names, full and distributed values, other meshes and world sizes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from autopar.runtime.parallel_module import ParallelModule
from autopar.sharding.layout import Layout
from tests.autopar.runtime.compilers import FollowingCompiler
from tests.autopar.runtime.models import assert_same_state, batch, everything, full, mlp, tokens
from tests.gloo import run_on_ranks

S0, S1 = Shard(0), Shard(1)
ADAM = partial(torch.optim.AdamW, lr=1e-2)


def distributed(model: nn.Module, mesh_shape: tuple[int, ...], stored: dict[str, Layout]) -> ParallelModule:
    mesh = init_device_mesh("cpu", mesh_shape)
    return ParallelModule(model, mesh, FollowingCompiler(mesh, (S0,) * len(mesh_shape), stored))


def step(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    (module(batch(seed=seed)) ** 2).mean().backward()
    optimizer.step()


def load_state_dicts() -> None:
    model, other = everything(0), everything(1)
    module = distributed(model, (2,), {"body.weight": (S0,)})
    assert list(module.state_dict()) == list(model.state_dict())
    assert all(isinstance(module.state_dict()[name], DTensor) for name, _ in model.named_parameters())
    module.load_state_dict(other.state_dict())
    assert_same_state(module, other)
    module(**tokens())
    module.load_state_dict(model.state_dict())
    assert_same_state(module, model)
    elsewhere = distributed(other, (2,), {})
    elsewhere.load_state_dict(module.state_dict())  # flat over the mesh from planned
    assert_same_state(elsewhere, module_on_one_device(module))
    parent = nn.ModuleDict({"inner": elsewhere})
    parent.load_state_dict({f"inner.{name}": value for name, value in everything(1).state_dict().items()})
    assert_same_state(elsewhere, everything(1))
    missing = module.load_state_dict({"body.bias": torch.ones(8)}, strict=False).missing_keys
    assert "body.weight" in missing and torch.equal(module.body.bias.full_tensor(), torch.ones(8))
    set_model_state_dict(module, other.state_dict(), options=StateDictOptions(full_state_dict=True))
    assert_same_state(module, other)
    whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        assert torch.equal(whole["body.weight"], other.body.weight)


def module_on_one_device(module: ParallelModule) -> nn.Module:
    model = everything(5)
    model.load_state_dict({name: full(value) for name, value in module.state_dict().items()})
    return model


def test_full_and_distributed_state_dicts_load_before_and_after_planning() -> None:
    run_on_ranks(load_state_dicts, 2)


def save_checkpoint(folder: str) -> None:
    module = distributed(mlp(), (4,), {"0.weight": (S0,), "0.bias": (S0,), "2.weight": (S1,)})
    optimizer = ADAM(module.parameters())
    step(module, optimizer, 1)
    state, optimizer_state = get_state_dict(module, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load_checkpoint(folder: str, mesh_shape: tuple[int, ...]) -> None:
    module = distributed(mlp(seed=7), mesh_shape, {"0.weight": (S1,) * len(mesh_shape)})
    optimizer = ADAM(module.parameters())
    module.attach_optimizer(optimizer)
    state, optimizer_state = get_state_dict(module, optimizer)
    dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    reference = mlp()
    expected = ADAM(reference.parameters())
    step(reference, expected, 1)
    for seed in (2, 3):
        step(module, optimizer, seed)
        step(reference, expected, seed)
    assert_same_state(module, reference)
    for parameter in module.parameters():
        assert optimizer.state[parameter]["exp_avg"].placements == parameter.placements


def test_a_checkpoint_of_four_ranks_goes_on_as_two_by_two_and_as_one(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    run_on_ranks(save_checkpoint, 4, folder)
    run_on_ranks(load_checkpoint, 4, folder, (2, 2))
    run_on_ranks(load_checkpoint, 1, folder, (1,))


def test_a_checkpoint_loads_into_the_model_itself(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    run_on_ranks(save_checkpoint, 4, folder)
    model, reference = mlp(seed=7), mlp()
    step(reference, ADAM(reference.parameters()), 1)
    state: dict[str, Any] = {"model": model.state_dict()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state["model"])
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


def begin_with_different_values() -> None:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    model[1].running_mean.normal_()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    module = distributed(model, (2, 2), {})
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    first[1].running_mean.normal_()
    assert_same_state(module, first)
    assert all(torch.equal(old, new) for old, new in zip(before, model.state_dict().values(), strict=True))


def test_the_first_ranks_values_win() -> None:
    run_on_ranks(begin_with_different_values, 4)
