"""Modules converted in the forward: to what they are is nothing, to anything else is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.trace import capture
from autopar.errors import CaptureError


class Converting(nn.Module):
    """A head that is kept in one dtype, as routers of mixture-of-experts models are."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.head, self.dtype = nn.Linear(4, 8), nn.Linear(8, 2), dtype

    def forward(self, x: Tensor) -> Tensor:
        self.head = self.head.to(self.dtype)
        return self.head(self.body(x).to(self.dtype)).square().mean()


def test_a_conversion_to_what_a_module_is_changes_nothing() -> None:
    model, x = Converting(torch.float32), torch.randn(8, 4)
    report = autopar.verify(model, (2,), example_inputs=x, search="fsdp")
    assert report.ok, report.table
    assert "_apply" not in vars(model.head) and isinstance(model.head.weight, nn.Parameter)


def test_a_conversion_to_another_dtype_is_refused_with_the_line() -> None:
    model = Converting(torch.float64)
    with pytest.raises(CaptureError, match="the forward converts Linear") as caught:
        capture(model, (torch.randn(8, 4),), {})
    assert "self.head.to" in caught.value.where
    assert model.head.weight.dtype == torch.float32 and "_apply" not in vars(model.head)
