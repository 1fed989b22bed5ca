from __future__ import annotations

import itertools
import math

import pytest
import torch

from autopar.nn import BalancedGate
from tests.autopar.nn.routings import D_MODEL, EXPERTS, check_shape_of, combine_matrix, double, gradcheck, tokens


def test_in_training_the_assignment_is_the_best_balanced_one() -> None:
    gate, x = double(BalancedGate(D_MODEL, 3)), tokens(6)
    scores = [[float(token @ gate.weight.detach()[e]) for e in range(3)] for token in x]
    balanced = set(itertools.permutations([0, 0, 1, 1, 2, 2]))
    best = max(balanced, key=lambda experts: sum(scores[t][e] for t, e in enumerate(experts)))
    routing = gate(x)
    assert routing.experts.flatten().tolist() == list(best)
    weights = [1 / (1 + math.exp(-scores[t][e])) for t, e in enumerate(best)]
    assert routing.weights.flatten().tolist() == pytest.approx(weights)
    check_shape_of(routing, 3)


def test_in_evaluation_a_token_goes_to_its_best_expert() -> None:
    gate, x = double(BalancedGate(D_MODEL, EXPERTS)).eval(), tokens()
    scores = x @ gate.weight.detach().T
    assert torch.equal(gate(x).experts.flatten(), scores.argmax(1))


def test_gradients_of_the_weights() -> None:
    gate, x = double(BalancedGate(D_MODEL, EXPERTS)), tokens(8)
    assert gradcheck(gate, x, lambda routing: combine_matrix(routing).square().sum())


def test_tokens_that_experts_do_not_divide_fill_them_up_to_the_share_rounded_up() -> None:
    routing = double(BalancedGate(D_MODEL, EXPERTS))(tokens(11))
    assert routing.capacity == 3
    assert sorted(torch.bincount(routing.experts.flatten()).tolist())[-1] == 3
    check_shape_of(routing)
