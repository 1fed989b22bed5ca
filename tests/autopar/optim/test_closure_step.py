"""A closure computes the loss anew, with gradients, before the step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from autopar.optim import SM3, Adafactor, Adam8bit, AdamW8bit, ShardedState

FACTORIES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SM3": SM3,
    "Adafactor": Adafactor,
    "Adam8bit": Adam8bit,
    "AdamW8bit": AdamW8bit,
    "sharded SGD": partial(ShardedState, optimizer=torch.optim.SGD, lr=0.1),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_closure_gives_the_loss_and_the_gradients_of_the_step(name: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = FACTORIES[name]([parameter])

    def closure() -> float:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        torch.autograd.backward(loss)
        return float(loss.detach())

    assert optimizer.step(closure) == 12.0
    assert optimizer.step(closure) < 12.0
    assert optimizer.step() is None


def test_weight_decay_is_by_default_that_of_torch() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    for ours, theirs in ((Adam8bit, torch.optim.Adam), (AdamW8bit, torch.optim.AdamW)):
        assert ours([parameter]).defaults["weight_decay"] == theirs([parameter]).defaults["weight_decay"]
