"""What the plain models are made of: a forward written as a function, inputs and weights with fixed values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 8
Made = tuple[nn.Module, tuple[Tensor, ...]]
Compute = Callable[..., Any]


class Computed(nn.Module):
    """`compute(self, *inputs)` as a forward, over the modules and parameters given by name."""

    def __init__(self, compute: Compute, **members: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, member in members.items():
            setattr(self, name, nn.Parameter(member) if isinstance(member, Tensor) else member)

    def forward(self, *inputs: Tensor) -> Any:
        return self.compute(self, *inputs)


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def below(limit: int, *size: int, seed: int = 0) -> Tensor:
    return torch.randint(limit, size, generator=torch.Generator().manual_seed(seed))


def weight(*size: int) -> Tensor:
    return normal(*size, seed=sum(size)) / math.sqrt(size[-1])
