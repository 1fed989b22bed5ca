from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.errors import InputError, UnsupportedOptionError
from autopar.nn import GShardGate
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


def algorithm_1(gates: Tensor, capacity: float, draws: Tensor) -> tuple[Tensor, float]:
    """(combine weights [tokens, experts], auxiliary loss) of one group, line by line (Lepikhin et al. 2020)."""
    size, experts = gates.shape
    combine = torch.zeros_like(gates)
    count = [0] * experts
    means = gates.mean(0)
    order = [sorted(range(experts), key=lambda e: -float(row[e]))[:2] for row in gates]
    for s in range(size):
        e1, e2 = order[s]
        if count[e1] < capacity:
            combine[s, e1] = gates[s, e1] / (gates[s, e1] + gates[s, e2])
        count[e1] += 1
    loss = sum(count[e] / size * float(means[e]) for e in range(experts)) / experts
    for s in range(size):
        e1, e2 = order[s]
        g2 = gates[s, e2] / (gates[s, e1] + gates[s, e2])
        if count[e2] < capacity and 2 * g2 > draws[s]:
            combine[s, e2] = g2
        count[e2] += 1
    return combine, loss


@pytest.mark.parametrize(("groups", "factor"), [(1, 1.0), (3, 1.0), (2, 0.7), (1, None)])
def test_weights_and_loss_are_those_of_algorithm_1(groups: int, factor: float | None) -> None:
    gate = double(GShardGate(D_MODEL, EXPERTS, groups=groups, capacity_factor=factor, aux_weight=1.0))
    x = tokens(24)
    torch.manual_seed(11)
    routing = gate(x)
    torch.manual_seed(11)
    draws = torch.rand(groups, 24 // groups, 1, dtype=torch.float64).squeeze(-1)
    capacity = 24.0 if factor is None else factor * 2 * 24 / (groups * EXPERTS)
    gates = torch.softmax(x @ gate.weight.detach().T, -1).reshape(groups, -1, EXPERTS)
    parts = [algorithm_1(gates[g], capacity, draws[g]) for g in range(groups)]
    torch.testing.assert_close(combine_matrix(routing), torch.cat([combine for combine, _ in parts]))
    assert routing.aux_loss.item() == pytest.approx(sum(loss for _, loss in parts) / groups)
    check_shape_of(routing)


def test_in_evaluation_the_second_expert_always_gets_the_token() -> None:
    gate = double(GShardGate(D_MODEL, EXPERTS)).eval()
    x = tokens(24)
    gates = torch.softmax(x @ gate.weight.detach().T, -1)
    expected, _ = algorithm_1(gates, 12.0, torch.zeros(24))
    torch.testing.assert_close(combine_matrix(gate(x)), expected)


def test_gradients_are_those_of_finite_differences() -> None:
    check_gradients(double(GShardGate(D_MODEL, EXPERTS, groups=2)), tokens(4))


def test_where_all_tokens_choose_the_same_two_experts_the_late_ones_are_dropped() -> None:
    gate = constant_router(double(GShardGate(D_MODEL, EXPERTS, random_dispatch="never")), [0.0, 3.0, 2.0, 0.0])
    routing = gate(same_tokens())
    assert chosen_pairs(routing) == {(t, e) for t in range(6) for e in (1, 2)}
    assert int(routing.dropped) == 12


def test_tokens_that_do_not_divide_into_the_groups_are_refused() -> None:
    with pytest.raises(InputError, match="12 tokens do not divide into 5 groups"):
        double(GShardGate(D_MODEL, EXPERTS, groups=5))(tokens())


def test_options_that_fit_no_gate_are_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="no 2 experts of 1"):
        GShardGate(D_MODEL, 1)
    with pytest.raises(UnsupportedOptionError, match="0 groups"):
        GShardGate(D_MODEL, EXPERTS, groups=0)
    with pytest.raises(UnsupportedOptionError, match="use one of: training, never"):
        GShardGate(D_MODEL, EXPERTS, random_dispatch="always")
