"""Small models that between them have every kind of state, and the comparison with a single device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F


def mlp(seed: int = 0) -> nn.Sequential:
    """Sizes that two ranks divide and four do not."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 10), nn.GELU(), nn.Linear(10, 6))


class Everything(nn.Module):
    """Tied, frozen and unused parameters, a buffer that each call changes, one that is not saved, a loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.body = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.calls += 1
        hidden = self.frozen(torch.relu(self.body(self.embedding(ids)))) * self.scale
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def everything(seed: int = 0) -> Everything:
    torch.manual_seed(seed)
    return Everything()


def tokens(batch: int = 8, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(0, 12, (2, batch, 5), generator=generator)
    return {"ids": draw[0], "labels": draw[1]}


def batch(rows: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def full(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_state(module: nn.Module, reference: nn.Module) -> None:
    """Parameters, gradients and buffers of a distributed module are those of a single-device one, by name."""
    expected = dict(reference.named_parameters())
    assert list(dict(module.named_parameters())) == list(expected)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(full(parameter.detach()), expected[name].detach(), msg=lambda m, n=name: f"{n}: {m}")
        gradient, wanted = full(parameter.grad), expected[name].grad
        assert (gradient is None) == (wanted is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, wanted, msg=lambda m, n=name: f"gradient of {n}: {m}")
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(dict(module.named_buffers())[name], buffer)


def train_both(
    module: nn.Module,
    model: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: int = 3,
) -> None:
    """Train a distributed module beside a copy of the model; assert after every step that they are the same."""
    reference = copy.deepcopy(model)
    optimizers = optimizer(module.parameters()), optimizer(reference.parameters())
    for _ in range(steps):
        for held in optimizers:
            held.zero_grad()
        loss, expected = loss_of(module), loss_of(reference)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        assert_same_state(module, reference)
        for held in optimizers:
            held.step()
    assert_same_state(module, reference)
