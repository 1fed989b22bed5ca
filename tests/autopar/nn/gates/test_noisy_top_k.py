from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from autopar.nn import NoisyTopKGate
from tests.autopar.nn.routings import D_MODEL, EXPERTS, check_gradients, check_shape_of, combine_matrix, double, tokens


def transcription(gate: NoisyTopKGate, x: Tensor, noise: Tensor, k: int) -> tuple[Tensor, list[float], list[float]]:
    """(G [tokens, experts], importance, load) by equations 3 to 5 and 8 to 10 of Shazeer et al."""
    weights = torch.zeros(len(x), EXPERTS, dtype=torch.float64)
    load = [0.0] * EXPERTS
    for t, token in enumerate(x):
        clean = [float(token @ gate.weight.detach()[e]) for e in range(EXPERTS)]
        spread = [math.log1p(math.exp(float(token @ gate.noise_weight.detach()[e]))) for e in range(EXPERTS)]
        h = [clean[e] + float(noise[t, e]) * spread[e] for e in range(EXPERTS)]
        kept = sorted(range(EXPERTS), key=lambda e: -h[e])[:k]
        total = sum(math.exp(h[e]) for e in kept)
        for e in range(EXPERTS):
            weights[t, e] = math.exp(h[e]) / total if e in kept else 0.0
            others = sorted((h[other] for other in range(EXPERTS) if other != e), reverse=True)
            if k == EXPERTS:
                load[e] += 1.0
            else:
                load[e] += NormalDist().cdf((clean[e] - others[k - 1]) / spread[e])
    return weights, weights.sum(0).tolist(), load


def squared_variation(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2


@pytest.mark.parametrize("k", [1, 2, EXPERTS])
def test_weights_and_losses_are_those_of_the_equations(k: int) -> None:
    gate, x = double(NoisyTopKGate(D_MODEL, EXPERTS, k, importance_weight=0.7, load_weight=0.2)), tokens()
    torch.manual_seed(11)
    routing = gate(x)
    torch.manual_seed(11)
    noise = torch.randn_like(x[:, :EXPERTS])
    expected, importance, load = transcription(gate, x, noise, k)
    torch.testing.assert_close(combine_matrix(routing), expected)
    wanted = 0.7 * squared_variation(importance) + 0.2 * squared_variation(load)
    assert routing.aux_loss.item() == pytest.approx(wanted)
    check_shape_of(routing)


@pytest.mark.parametrize("k", [2, EXPERTS])
def test_gradients_are_those_of_finite_differences(k: int) -> None:
    check_gradients(double(NoisyTopKGate(D_MODEL, EXPERTS, k)), tokens(4))


def test_in_evaluation_there_is_no_noise_and_the_load_is_counted() -> None:
    gate, x = double(NoisyTopKGate(D_MODEL, EXPERTS, 2, importance_weight=0.0, load_weight=1.0)).eval(), tokens()
    routing = gate(x)
    expected, _, _ = transcription(gate, x, torch.zeros(12, EXPERTS), 2)
    torch.testing.assert_close(combine_matrix(routing), expected)
    counts = [float(value) for value in (expected > 0).sum(0)]
    assert routing.aux_loss.item() == pytest.approx(squared_variation(counts))


def test_it_starts_with_noise_alone() -> None:
    gate = NoisyTopKGate(D_MODEL, 64, 4).train()
    routing = gate(torch.randn(512, D_MODEL))
    counts = torch.bincount(routing.experts.flatten(), minlength=64)
    assert int(counts.min()) > 10
    assert routing.aux_loss.item() < 0.01
