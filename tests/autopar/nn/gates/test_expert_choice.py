from __future__ import annotations

import math

import pytest
import torch

from autopar.nn import ExpertChoiceGate
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


@pytest.mark.parametrize("factor", [1.0, 2.0, 2.5])
def test_every_expert_takes_its_best_tokens(factor: float) -> None:
    gate, x = double(ExpertChoiceGate(D_MODEL, EXPERTS, capacity_factor=factor)), tokens()
    routing = gate(x)
    scores = torch.zeros(len(x), EXPERTS, dtype=torch.float64)
    for t, token in enumerate(x):
        logits = [float(token @ gate.weight.detach()[e]) for e in range(EXPERTS)]
        for e in range(EXPERTS):
            scores[t, e] = math.exp(logits[e]) / sum(math.exp(value) for value in logits)
    k = math.ceil(len(x) * factor / EXPERTS)
    expected = torch.zeros_like(scores)
    for e in range(EXPERTS):
        for t in sorted(range(len(x)), key=lambda t: -float(scores[t, e]))[:k]:
            expected[t, e] = scores[t, e]
    torch.testing.assert_close(combine_matrix(routing), expected)
    assert routing.capacity == k
    assert routing.aux_loss.item() == routing.dropped.item() == 0
    check_shape_of(routing)


def test_gradients_are_those_of_finite_differences() -> None:
    check_gradients(double(ExpertChoiceGate(D_MODEL, EXPERTS)), tokens(4))


def test_of_equal_tokens_the_first_are_taken() -> None:
    routing = constant_router(double(ExpertChoiceGate(D_MODEL, EXPERTS)), [0.0] * EXPERTS)(same_tokens())
    assert chosen_pairs(routing) == {(t, e) for t in range(6) for e in range(EXPERTS)}


@pytest.mark.parametrize(("factor", "kept"), [(0.0, 0), (100.0, 48)])
def test_capacities_of_nothing_and_of_everything(factor: float, kept: int) -> None:
    routing = double(ExpertChoiceGate(D_MODEL, EXPERTS, capacity_factor=factor))(tokens())
    assert len(chosen_pairs(routing)) == kept
    check_shape_of(routing)
