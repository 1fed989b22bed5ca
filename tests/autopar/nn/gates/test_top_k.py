from __future__ import annotations

import math

import pytest
import torch

from autopar.nn import TopKGate
from tests.autopar.nn.routings import (
    D_MODEL,
    EXPERTS,
    check_gradients,
    check_shape_of,
    chosen_pairs,
    combine_matrix,
    constant_router,
    double,
    same_tokens,
    tokens,
)


@pytest.mark.parametrize("normalize", ["selected", "all"])
@pytest.mark.parametrize("k", [1, 2, EXPERTS])
def test_weights_and_losses_are_those_of_the_equations(k: int, normalize: str) -> None:
    gate, x = double(TopKGate(D_MODEL, EXPERTS, k, normalize=normalize, balance_weight=0.3, z_weight=0.2)), tokens()
    routing = gate(x)
    expected = torch.zeros(len(x), EXPERTS, dtype=torch.float64)
    counts, means, z_loss = [0] * EXPERTS, [0.0] * EXPERTS, 0.0
    for t, token in enumerate(x):
        logits = [float(token @ gate.weight.detach()[e]) for e in range(EXPERTS)]
        total = sum(math.exp(value) for value in logits)
        chosen = sorted(range(EXPERTS), key=lambda e: -logits[e])[:k]
        share = sum(math.exp(logits[e]) for e in chosen) if normalize == "selected" else total
        for e in range(EXPERTS):
            means[e] += math.exp(logits[e]) / total / len(x)
            if e in chosen:
                expected[t, e] = math.exp(logits[e]) / share
                counts[e] += 1
        z_loss += math.log(total) ** 2 / len(x)
    balance = EXPERTS * sum(counts[e] / (k * len(x)) * means[e] for e in range(EXPERTS))
    torch.testing.assert_close(combine_matrix(routing), expected)
    assert routing.aux_loss.item() == pytest.approx(0.3 * balance + 0.2 * z_loss)
    assert int(routing.dropped) == 0
    check_shape_of(routing)


def test_gradients_are_those_of_finite_differences() -> None:
    check_gradients(double(TopKGate(D_MODEL, EXPERTS, 2, z_weight=0.5)), tokens(4))


def test_with_a_capacity_first_choices_go_before_second_ones_and_early_tokens_before_late_ones() -> None:
    gate = constant_router(double(TopKGate(D_MODEL, EXPERTS, 2, capacity_factor=1.0)), [0.0, 3.0, 2.0, 0.0])
    x = same_tokens()
    x[6:, 0] = -1  # these prefer experts 0 and 3, then 2
    routing = gate(x)  # capacity 12 * 2 / 4 = 6
    assert routing.capacity == 6
    assert chosen_pairs(routing) == {(t, e) for t in range(6) for e in (1, 2)} | {
        (t, e) for t in range(6, 12) for e in (0, 3)
    }
    assert int(routing.dropped) == 0
    gate.capacity_factor = 0.5
    routing = gate(x)
    assert chosen_pairs(routing) == {(t, e) for t in range(3) for e in (1, 2)} | {
        (t, e) for t in range(6, 9) for e in (0, 3)
    }
    assert int(routing.dropped) == 12
    check_shape_of(routing)


def test_equal_scores_go_to_the_first_experts() -> None:
    routing = constant_router(double(TopKGate(D_MODEL, EXPERTS, 2)), [1.0] * EXPERTS)(same_tokens())
    assert routing.experts.tolist() == [[0, 1]] * 12
    assert routing.weights.tolist() == [[0.5, 0.5]] * 12


def test_one_expert_gets_everything() -> None:
    routing = double(TopKGate(D_MODEL, 1, 1))(tokens())
    assert chosen_pairs(routing, 1) == {(t, 0) for t in range(12)}
    assert routing.aux_loss.item() == pytest.approx(0.01)


def test_logits_far_apart_give_no_infinities() -> None:
    routing = constant_router(double(TopKGate(D_MODEL, EXPERTS, 2)), [-2e4, 1e4, 0.0, -1e4])(same_tokens())
    assert routing.experts.tolist() == [[1, 2]] * 12
    assert bool(torch.isfinite(routing.weights).all())
