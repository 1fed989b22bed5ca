"""What follows from constants alone is known while tracing; what an input or a random number reaches is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.trace import capture
from autopar.errors import DataDependentError

EVEN = torch.arange(6) % 2 == 0


class Computed(nn.Module):
    """A layer, and a function of its [8, 6, 5] result."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 5), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def branch_on_a_mask_made_in_place(hidden: Tensor) -> Tensor:
    mask = torch.zeros(6)
    mask[2:5].fill_(1)
    mask.mul_(2)
    return hidden * int(mask.max()) if mask.sum() > 5 else hidden


def sizes_from_a_tensor(hidden: Tensor) -> list[Tensor]:
    return list(torch.split(hidden, torch.tensor([2, 4]).tolist(), 1))


def repeated(hidden: Tensor) -> Tensor:
    return torch.repeat_interleave(hidden, torch.tensor([2, 0, 1, 1, 1, 1]), 1)


def pairs(hidden: Tensor) -> Tensor:
    return (hidden @ hidden.transpose(1, 2))[:, torch.ones(6, 6).tril().bool()]


def spectrum_and_back(hidden: Tensor) -> Tensor:
    window = torch.hann_window(8)
    seen = torch.stft(hidden.flatten(1)[:, :16], 8, hop_length=4, window=window, return_complex=True)
    return torch.istft(seen, 8, hop_length=4, window=window, length=16)


KNOWN: tuple[Callable[[Tensor], Any], ...] = (
    branch_on_a_mask_made_in_place,
    sizes_from_a_tensor,
    repeated,
    pairs,
    spectrum_and_back,
    lambda hidden: hidden[:, EVEN],
    lambda hidden: hidden.masked_select(EVEN[:, None]),
    lambda hidden: hidden[:, torch.tensor([3, 1, 1]).unique()],
    lambda hidden: torch.cov(hidden[0]),
    lambda hidden: torch.combinations(hidden[0, 0], 2),
)


@pytest.mark.parametrize("function", KNOWN)
def test_constants_may_be_branched_on_and_may_shape_tensors(function: Callable[[Tensor], Any]) -> None:
    report = autopar.verify(Computed(function), (2,), example_inputs=torch.randn(8, 6, 4), search="fsdp")
    assert report.ok, report.table


def test_a_program_planned_for_gpus_holds_what_was_computed_on_the_cpu() -> None:
    model = Computed(lambda hidden: hidden.masked_select(EVEN.to(hidden.device).unsqueeze(1)))
    with torch.no_grad():  # gradients of tensors on a device need a PyTorch that was built for it
        program = capture(model, (torch.ones(8, 6, 4),), {}, device="cuda")
    assert {node.meta["val"].device.type for node in program.results} == {"cuda"}


def written_from_the_input(hidden: Tensor) -> Tensor:
    mask = torch.ones(6)
    mask[:1].copy_(hidden[0, 0, :1])
    return hidden[:, mask > 0]


UNKNOWN: tuple[Callable[[Tensor], Any], ...] = (
    written_from_the_input,
    lambda hidden: hidden[:, torch.rand(6) > 0.5],
    lambda hidden: hidden[hidden[:, 0, 0] > 0],
    lambda hidden: hidden.masked_select(hidden > 0),
)


@pytest.mark.parametrize("function", UNKNOWN)
def test_what_inputs_or_chance_reach_is_refused(function: Callable[[Tensor], Any]) -> None:
    with pytest.raises(DataDependentError) as caught:
        capture(Computed(function), (torch.ones(8, 6, 4),), {})
    assert "test_known_values.py" in caught.value.where
