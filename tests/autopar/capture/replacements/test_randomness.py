"""Torch's random functions, replaced: their distributions, their shapes, and that their keys alone decide."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.errors import UnsupportedRandomError
from tests.interception import Intercepted, assert_capture_matches_eager, targets_of

COUNT = 40_000

# name: (draws COUNT values, mean, standard deviation)
SAMPLERS: dict[str, tuple[Callable[[], Tensor], float, float]] = {
    "rand": (lambda: torch.rand(COUNT), 0.5, math.sqrt(1 / 12)),
    "rand of a tuple": (lambda: torch.rand((200, 200)), 0.5, math.sqrt(1 / 12)),
    "rand of a size": (lambda: torch.rand(size=(200, 200)), 0.5, math.sqrt(1 / 12)),
    "randn": (lambda: torch.randn(200, 200), 0, 1),
    "rand_like": (lambda: torch.rand_like(torch.empty(COUNT)), 0.5, math.sqrt(1 / 12)),
    "randn_like": (lambda: torch.randn_like(torch.empty(COUNT)), 0, 1),
    "randint": (lambda: torch.randint(3, 7, (COUNT,)).double(), 4.5, math.sqrt(15 / 12)),
    "randint by keyword": (lambda: torch.randint(high=4, size=(COUNT,)).double(), 1.5, math.sqrt(15 / 12)),
    "randint_like": (lambda: torch.randint_like(torch.empty(COUNT), 4), 1.5, math.sqrt(15 / 12)),
    "normal of floats": (lambda: torch.normal(1.0, 2.0, (COUNT,)), 1, 2),
    "normal of tensors": (lambda: torch.normal(torch.ones(COUNT), torch.full((COUNT,), 2.0)), 1, 2),
    "complex": (lambda: torch.view_as_real(torch.randn(COUNT // 2, dtype=torch.complex64)), 0, math.sqrt(0.5)),
    "bernoulli": (lambda: torch.bernoulli(torch.full((COUNT,), 0.3)), 0.3, math.sqrt(0.21)),
    "bernoulli with p": (lambda: torch.empty(COUNT).bernoulli(0.3), 0.3, math.sqrt(0.21)),
    "bernoulli_": (lambda: torch.empty(COUNT).bernoulli_(0.3), 0.3, math.sqrt(0.21)),
    "bernoulli_ of a tensor": (lambda: torch.empty(COUNT).bernoulli_(torch.tensor(0.3)), 0.3, math.sqrt(0.21)),
    "uniform_": (lambda: torch.empty(COUNT).uniform_(2, 4), 3, 2 * math.sqrt(1 / 12)),
    "normal_": (lambda: torch.empty(COUNT).normal_(1, 2), 1, 2),
    "exponential_": (lambda: torch.empty(COUNT).exponential_(2.0), 0.5, 0.5),
    "geometric_": (lambda: torch.empty(COUNT).geometric_(0.25), 4, math.sqrt(0.75) / 0.25),
    "log_normal_": (lambda: torch.empty(COUNT).log_normal_(1, 2).log(), 1, 2),
    "cauchy_": (lambda: (torch.empty(COUNT).cauchy_(3, 2) < 3).double(), 0.5, 0.5),
    "random_": (lambda: torch.empty(COUNT).random_(4), 1.5, math.sqrt(15 / 12)),
    "random_ of a range": (
        lambda: torch.empty(COUNT, dtype=torch.int64).random_(3, 7).double(),
        4.5,
        math.sqrt(15 / 12),
    ),
    "multinomial": (lambda: torch.multinomial(torch.tensor([1.0, 3.0]), COUNT, True).double(), 0.75, math.sqrt(3) / 4),
    "dropout": (lambda: F.dropout(torch.ones(COUNT), 0.2), 1, 0.5),
    "torch.dropout": (lambda: torch.dropout(torch.ones(COUNT), 0.2, True), 1, 0.5),
    "alpha_dropout": (lambda: F.alpha_dropout(torch.randn(COUNT), 0.2), 0, 1),
    "gumbel_softmax": (lambda: F.gumbel_softmax(torch.zeros(COUNT, 2), hard=True)[:, 0], 0.5, 0.5),
    "Normal.rsample": (lambda: torch.distributions.Normal(1.0, torch.full((COUNT,), 2.0)).rsample(), 1, 2),
    "rrelu": (lambda: F.rrelu(-torch.ones(COUNT), 0.2, 0.4, training=True), -0.3, 0.2 * math.sqrt(1 / 12)),
    "ATen rand": (lambda: torch.ops.aten.rand.default([COUNT]), 0.5, math.sqrt(1 / 12)),
    "ATen dropout": (lambda: torch.ops.aten.dropout.default(torch.ones(COUNT), 0.2, True), 1, 0.5),
    "ATen native_dropout": (lambda: torch.ops.aten.native_dropout.default(torch.ones(COUNT), 0.2, True)[0], 1, 0.5),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_has_its_mean_and_deviation_and_follows_its_key(name: str) -> None:
    draw, mean, deviation = SAMPLERS[name]
    drawn = []
    for seed in (3, 3, 4):
        with Intercepted(seed):
            drawn.append(draw())
        torch.manual_seed(seed + 100)  # PyTorch's own generator has no say
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    values = drawn[0].double()
    assert abs(float(values.mean()) - mean) < 6 * deviation / math.sqrt(COUNT)
    assert float(values.std()) == pytest.approx(deviation, rel=0.06)


def test_each_call_draws_its_own_values() -> None:
    with Intercepted():
        first, second = torch.rand(100), torch.rand(100)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("function", "shape", "kept_dims"),
    [
        (F.dropout1d, (20, 30, 4), 2),
        (F.dropout1d, (30, 4), 1),
        (F.dropout2d, (20, 30, 2, 3), 2),
        (F.dropout3d, (20, 30, 2, 3, 2), 2),
        (F.dropout3d, (30, 2, 3, 2), 1),
        (F.feature_alpha_dropout, (20, 30, 2, 3), 2),
    ],
)
def test_feature_dropouts_drop_whole_channels(function: Any, shape: tuple[int, ...], kept_dims: int) -> None:
    with Intercepted():
        value = function(torch.ones(shape), 0.5, training=True)
    channels = value.flatten(kept_dims)
    assert bool((channels == channels[..., :1]).all()) and len(value.unique()) == 2


def test_dropout_in_place_and_dropout_off_and_total() -> None:
    x = torch.ones(50)
    with Intercepted():
        assert F.dropout(x, 0.5, inplace=True) is x and x.unique().tolist() == [0, 2]
        assert torch.equal(F.dropout(x, 0.5, training=False), x) and torch.equal(F.dropout(x, 0.0), x)
        assert not F.dropout(x, 1.0).any()


def test_permutations_and_samples_without_replacement_repeat_nothing() -> None:
    with Intercepted():
        assert torch.randperm(50).sort().values.tolist() == list(range(50))
        picked = torch.multinomial(torch.tensor([[0.1, 0.2, 0.3, 0.0]] * 50), 3)
    assert all(sorted(row) == [0, 1, 2] for row in picked.tolist())


def test_samplers_without_a_form_are_refused_with_advice() -> None:
    with Intercepted(), pytest.raises(UnsupportedRandomError, match=r"torch\.poisson(.|\n)*fix:"):
        torch.poisson(torch.ones(3))


class Noisy(nn.Module):
    """Random functions of every kind, whose effect on the result is none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout, self.alpha = nn.Linear(4, 4), nn.Dropout(0.1), nn.AlphaDropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(4) + torch.randn_like(x) + torch.empty_like(x).exponential_()
        noise = noise + F.fractional_max_pool2d(x[None, None], 2, output_size=2).sum() + F.gumbel_softmax(x)
        return self.linear(x) + 0 * self.alpha(self.dropout(noise))


def test_captured_graphs_hold_no_other_random_op() -> None:
    program = assert_capture_matches_eager(Noisy(), (torch.randn(6, 4),))
    random = {name for name in targets_of(program.graph_module) if "rand" in name or "bernoulli" in name}
    assert random == {f"autopar.random_{kind}.default" for kind in ("mask", "uniform", "normal")}
