"""Adafactor against that of torch, on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.optim import Adafactor

CASES: list[dict[str, Any]] = [
    {},
    {"lr": 0.5, "weight_decay": 0.1, "maximize": True},
    {"d": 2.0, "eps": (1e-4, 1e-2), "lr": 1.0},
]


@pytest.mark.parametrize("options", CASES, ids=["defaults", "decayed", "clipped"])
@pytest.mark.parametrize("shape", [(), (6,), (6, 4), (3, 4, 5)], ids=str)
def test_on_one_device_it_computes_what_torch_computes(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(shape, dtype=torch.float64)) for _ in range(2))
    first, second = Adafactor([ours], **options), torch.optim.Adafactor([theirs], **options)
    for _ in range(4):
        gradient = torch.randn(shape, dtype=torch.float64)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        first.step()
        second.step()
    torch.testing.assert_close(ours, theirs)
    assert first.state[ours].keys() == second.state[theirs].keys()
