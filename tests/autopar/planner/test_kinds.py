"""Repeated layers are of one kind, whatever random numbers each draws."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar


class Layer(nn.Module):
    """Attention and a feed-forward part, both with dropout."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=p, batch_first=True)
        self.wide, self.narrow, self.dropout = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        out: torch.Tensor = x + self.dropout(self.narrow(torch.relu(self.wide(x))))
        return out


def classes(layers: int, p: float) -> int:
    model = nn.Sequential(*(Layer(p) for _ in range(layers)))
    plan = autopar.make_plan(model, (2, 2), example_inputs=torch.randn(4, 8, 16))
    assert plan.problem is not None and plan.problem.groups is not None
    return len(set(plan.problem.groups))


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_deeper_models_have_hardly_more_to_decide(p: float) -> None:
    assert classes(6, p) <= classes(4, p) + 12
