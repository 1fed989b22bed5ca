from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from autopar.errors import UnsupportedOptionError
from autopar.nn import GroupLimit, SigmoidGate
from tests.autopar.nn.routings import (
    D_MODEL,
    check_gradients,
    check_shape_of,
    chosen_pairs,
    combine_matrix,
    constant_router,
    double,
    same_tokens,
    tokens,
)

MANY = 8  # experts, in four groups


def make(**options: Any) -> SigmoidGate:
    gate = double(SigmoidGate(D_MODEL, MANY, 3, **options))
    assert isinstance(gate, SigmoidGate)
    gate.expert_bias.copy_(torch.linspace(-0.3, 0.3, MANY))
    return gate


@pytest.mark.parametrize("limit", [None, GroupLimit(4, 2), GroupLimit(2, 1, summed=3)])
def test_weights_and_loss_are_those_of_the_equations(limit: GroupLimit | None) -> None:
    gate = make(scale=2.5, sequence_balance_weight=0.4, group_limit=limit)
    x = tokens(12).reshape(3, 4, D_MODEL)
    bias = gate.expert_bias.tolist()
    routing = gate(x)
    expected, loss = torch.zeros(12, MANY, dtype=torch.float64), 0.0
    for b in range(3):
        counts, means = [0] * MANY, [0.0] * MANY
        for t in range(4):
            s = [1 / (1 + math.exp(-float(x[b, t] @ gate.weight.detach()[e]))) for e in range(MANY)]
            usable = set(range(MANY))
            if limit is not None:
                size = MANY // limit.groups
                groups = [list(range(g * size, g * size + size)) for g in range(limit.groups)]
                rank = sorted(groups, key=lambda g: -sum(sorted(s[e] + bias[e] for e in g)[-limit.summed :]))
                usable = {e for group in rank[: limit.chosen] for e in group}
            chosen = sorted(usable, key=lambda e: -(s[e] + bias[e]))[:3]
            for e in chosen:
                expected[4 * b + t, e] = 2.5 * s[e] / sum(s[other] for other in chosen)
                counts[e] += 1
            for e in range(MANY):
                means[e] += s[e] / sum(s) / 4
        loss += sum(MANY / (3 * 4) * counts[e] * means[e] for e in range(MANY)) / 3
    torch.testing.assert_close(combine_matrix(routing, MANY), expected)
    assert routing.aux_loss.item() == pytest.approx(0.4 * loss)
    check_shape_of(routing, MANY)


def test_gradients_do_not_reach_the_bias() -> None:
    gate = make(group_limit=GroupLimit(4, 2))
    check_gradients(gate, tokens(4))
    assert not gate.expert_bias.requires_grad


def test_the_bias_moves_against_the_load_error_after_the_choice() -> None:
    gate = make(bias_update_rate=0.01)
    before, x = gate.expert_bias.clone(), tokens(16)
    routing = gate(x)
    counts = [sum(1 for pair in chosen_pairs(routing, MANY) if pair[1] == e) for e in range(MANY)]
    mean = 16 * 3 / MANY
    moved = [0.01 * ((count < mean) - (count > mean)) for count in counts]
    torch.testing.assert_close(gate.expert_bias - before, torch.tensor(moved, dtype=torch.float64))
    gate.eval()
    settled = gate.expert_bias.clone()
    gate(x)
    assert torch.equal(gate.expert_bias, settled)


def test_the_bias_balances_a_skewed_router() -> None:
    gate = double(SigmoidGate(D_MODEL, MANY, 2, bias_update_rate=0.01))
    with torch.no_grad():
        gate.weight[:, 0] = torch.arange(MANY)  # the last experts score highest
    x = tokens(256)
    x[:, 0] = 1
    first = torch.bincount(gate(x).experts.flatten(), minlength=MANY)
    for _ in range(200):
        last = torch.bincount(gate(x).experts.flatten(), minlength=MANY)
    assert int(first.max()) > 150
    assert int(last.max()) < 100  # the mean is 64


def test_a_token_stays_within_its_groups() -> None:
    gate = constant_router(make(group_limit=GroupLimit(4, 2)), [5.0, 0.0, 4.0, 0.0, 3.0, 3.0, 0.0, 0.0])
    gate.expert_bias.zero_()
    routing = gate(same_tokens())
    assert all({expert // 2 for expert in row} == {2, 0} for row in routing.experts.tolist())


@pytest.mark.parametrize(
    "limit", [GroupLimit(3, 1), GroupLimit(4, 5), GroupLimit(4, 1), GroupLimit(4, 2, 3), GroupLimit(0, 1)]
)
def test_groups_that_do_not_fit_the_experts_are_refused(limit: GroupLimit) -> None:
    with pytest.raises(UnsupportedOptionError):
        SigmoidGate(D_MODEL, MANY, 3, group_limit=limit)
