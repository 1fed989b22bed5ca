"""Other torch functions that could trace badly on fake tensors, and exported programs: traced, they equal eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.trace import capture
from tests.interception import Calling, assert_capture_matches_eager, targets_of

LABELS = torch.tensor([[1, 2, 3], [2, 1, 0]])
IMAGE = (2, 3, 4, 6)
GRID = torch.rand(1, 4, 6, 2, dtype=torch.float64) * 2 - 1

# name: (function of a parameter, its shape)
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "ctc of lists": (lambda w: F.ctc_loss(w.log_softmax(-1), LABELS, (7, 6), (3, 2)), (7, 2, 5)),
    "ctc of one sequence": (lambda w: F.ctc_loss(w.log_softmax(-1), LABELS[0], (7,), (3,), reduction="sum"), (7, 5)),
    "ctc of joined targets": (lambda w: F.ctc_loss(w.log_softmax(-1), LABELS.flatten()[:5], (7, 6), (3, 2)), (7, 2, 5)),
    "impossible ctc": (lambda w: F.ctc_loss(w.log_softmax(-1), LABELS, (2, 6), (3, 2), zero_infinity=True), (7, 2, 5)),
    "nearest": (lambda w: F.interpolate(w, scale_factor=2.0), IMAGE),
    "nearest-exact": (lambda w: F.interpolate(w, scale_factor=2.0, mode="nearest-exact"), IMAGE),
    "bilinear": (lambda w: F.interpolate(w, size=(7, 5), mode="bilinear", align_corners=True), IMAGE),
    "antialiased": (lambda w: F.interpolate(w, size=(2, 5), mode="bilinear", antialias=True), IMAGE),
    "bicubic": (lambda w: F.interpolate(w, scale_factor=1.5, mode="bicubic"), IMAGE),
    "trilinear": (lambda w: F.interpolate(w, scale_factor=2, mode="trilinear"), (1, 2, 3, 4, 5)),
    "area": (lambda w: F.interpolate(w, size=(2, 3), mode="area"), IMAGE),
    "grid_sample": (
        lambda w: F.grid_sample(w, GRID, align_corners=False),
        (1, 3, 4, 6),
    ),
    "fold": (lambda w: F.fold(F.unfold(w, 2), (4, 6), 2), IMAGE),
    "max_unpool": (lambda w: F.max_unpool2d(*F.max_pool2d(w, 2, return_indices=True), 2), IMAGE),
    "adaptive pools": (lambda w: F.adaptive_avg_pool2d(w, (2, 4)) + F.adaptive_max_pool2d(w, (2, 4)), IMAGE),
    "one_hot": (lambda w: F.one_hot(LABELS, 4).double() @ w, (4, 3)),
    "gaussian_nll": (lambda w: F.gaussian_nll_loss(w, w.detach() + 1, w.exp()), (5,)),
    "distributions": (lambda w: torch.distributions.Normal(w, w.exp()).log_prob(torch.ones(3).double()), (3,)),
    "kl of distributions": (
        lambda w: torch.distributions.kl_divergence(
            torch.distributions.Normal(w, w.exp()), torch.distributions.Normal(torch.zeros(3).double(), 1.0)
        ),
        (3,),
    ),
    "embedding_bag": (lambda w: F.embedding_bag(LABELS, w, mode="mean"), (4, 3)),
    "norms": (lambda w: F.layer_norm(w, (6,)) + F.group_norm(w, 3) + F.rms_norm(w, (6,)), IMAGE),
    "spectra": (lambda w: torch.fft.irfft(torch.fft.rfft(w) * 2), (2, 16)),
    "cdist": (lambda w: torch.cdist(w, w.flip(0) + 1), (3, 4)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_captured_with_its_gradient(name: str) -> None:
    function, shape = FUNCTIONS[name]
    assert_capture_matches_eager(Calling(function, *shape), ())


def test_lengths_that_are_inputs_need_not_be_known() -> None:
    def loss(weight: Tensor, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.ctc_loss((x * weight).log_softmax(-1), LABELS, inputs, targets)

    lengths = (torch.tensor([7, 6]), torch.tensor([3, 2]))
    assert_capture_matches_eager(Calling(loss, 5), (torch.randn(7, 2, 5), *lengths))


class Everything(nn.Module):
    """Modules whose functions are replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.dropout = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.1)
        self.lstm, self.attention = nn.LSTM(6, 4, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.dropout(self.norm(self.convolution(x))).flatten(1, 2)
        states: Tensor = self.lstm(rows)[0]
        attended: Tensor = self.attention(states, states, states, need_weights=False)[0]
        return attended + torch.rand(4)


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # of the LSTM
def test_exported_programs_meet_the_same_replacements() -> None:
    x = torch.randn(2, 3, 8, 8)
    from_module = targets_of(capture(Everything(), (x,), {}).graph_module)
    from_program = targets_of(capture(torch.export.export(Everything(), (x,)), (x,), {}).graph_module)
    ours = {name for name in from_module if name.startswith("autopar.")}
    assert len(ours) == 10
    assert ours == {name for name in from_program if name.startswith("autopar.")}
