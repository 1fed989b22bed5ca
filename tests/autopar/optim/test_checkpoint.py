"""Distributed checkpoints of these optimizers go on under another layout, where one device would be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from autopar.optim import SM3, Adafactor, Adam8bit, ShardedState
from autopar.sharding.layout import parse_layout
from tests.gloo import run_on_ranks

FACTORIES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SM3": SM3,
    "Adafactor": Adafactor,
    "Adam8bit": Adam8bit,
    "sharded AdamW": partial(ShardedState, optimizer=torch.optim.AdamW),
}


class Weights(nn.Module):
    """Parameters alone."""

    def __init__(self, layout: str | None) -> None:
        super().__init__()
        value = torch.linspace(-1, 1, 96 * 64).view(96, 64)
        mesh = init_device_mesh("cpu", (2,)) if layout else None
        self.weight = nn.Parameter(distribute_tensor(value, mesh, parse_layout(layout, 1)) if layout else value)


def step(module: Weights, optimizer: torch.optim.Optimizer, number: int) -> None:
    gradient = torch.randn(96, 64, generator=torch.Generator().manual_seed(number))
    weight = module.weight
    if isinstance(weight, DTensor):
        gradient = distribute_tensor(gradient, weight.device_mesh, weight.placements)
    weight.grad = gradient
    optimizer.step()


def continued(folder: str) -> dict[str, float]:
    """By optimizer: the difference to one device of a run that is saved from rows and goes on in another layout."""
    found = {}
    for name, factory in FACTORIES.items():
        alone, first = Weights(None), Weights("S0")
        second = Weights("R" if name.startswith("sharded") else "S1")
        optimizers = [factory(module.parameters()) for module in (alone, first, second)]
        for number in range(2):
            step(alone, optimizers[0], number)
            step(first, optimizers[1], number)
        state, optimizer_state = get_state_dict(first, optimizers[1])
        dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/{name}")
        state, optimizer_state = get_state_dict(second, optimizers[2])
        dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/{name}")
        set_state_dict(second, optimizers[2], model_state_dict=state, optim_state_dict=optimizer_state)
        step(alone, optimizers[0], 2)
        step(second, optimizers[2], 2)
        assert isinstance(second.weight, DTensor)
        found[name] = float((second.weight.full_tensor() - alone.weight).abs().max())
    return found


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_goes_on_under_another_layout(tmp_path_factory: pytest.TempPathFactory) -> None:
    for found in run_on_ranks(continued, 2, str(tmp_path_factory.mktemp("checkpoints"))):
        assert max(found.values()) < 1e-6, found
