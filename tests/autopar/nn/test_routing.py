from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InputError, UnsupportedOptionError
from autopar.nn import (
    BalancedGate,
    ExpertChoiceGate,
    Gate,
    GShardGate,
    NoisyTopKGate,
    SigmoidGate,
    SwitchGate,
    TopKGate,
)
from autopar.nn.routing import count_tokens, keep_within_capacity, position_in_expert, top_k

GATES = [
    TopKGate(6, 4), NoisyTopKGate(6, 4, 2), GShardGate(6, 4), SwitchGate(6, 4), ExpertChoiceGate(6, 4),
    BalancedGate(6, 4), SigmoidGate(6, 4, 2),
]  # fmt: skip

entries = st.lists(st.integers(0, 3), min_size=1, max_size=30)


@given(st.lists(entries, min_size=1, max_size=1), st.integers(0, 9))
def test_positions_and_counts_are_those_of_a_queue_per_expert(rows: list[list[int]], capacity: int) -> None:
    experts = torch.tensor(rows)
    seen = [0] * 4
    expected = []
    for expert in rows[0]:
        expected.append(seen[expert])
        seen[expert] += 1
    assert position_in_expert(experts, 3).tolist() == [expected]  # 3 stands for a dropped choice
    assert count_tokens(experts, 3).tolist() == [seen[:3]]
    kept = keep_within_capacity(experts.unsqueeze(-1), 3, capacity)
    assert kept.flatten().tolist() == [position < capacity for position in expected]


def test_first_choices_come_before_second_ones() -> None:
    experts = torch.tensor([[[0, 1], [1, 0], [1, 0]]])
    assert keep_within_capacity(experts, 2, 2).tolist() == [[[True, False], [True, True], [True, False]]]


def test_of_equal_values_the_first_is_taken() -> None:
    values, indices = top_k(torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]]), 2)
    assert values.tolist() == [[3, 3]]
    assert indices.tolist() == [[1, 2]]


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: type(gate).__name__)
def test_an_empty_batch_is_refused(gate: Gate) -> None:
    for shape in ((0, 6), (2, 0, 6)):
        with pytest.raises(InputError, match="the batch has no tokens"):
            gate(torch.zeros(shape))


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: type(gate).__name__)
def test_an_input_of_another_width_is_refused(gate: Gate) -> None:
    for shape in ((3, 5), (6,)):
        with pytest.raises(InputError, match="routes tokens of 6 numbers"):
            gate(torch.zeros(shape))


@pytest.mark.parametrize(("experts", "k"), [(4, 5), (4, 0), (0, 1)])
def test_more_choices_than_experts_are_refused(experts: int, k: int) -> None:
    with pytest.raises(UnsupportedOptionError, match=f"no {k} experts of {experts}"):
        TopKGate(6, experts, k)


def test_an_unknown_way_to_normalize_is_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="use one of: selected, all"):
        TopKGate(6, 4, normalize="sum")


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: type(gate).__name__)
def test_the_same_seed_gives_the_same_routing(gate: Gate) -> None:
    x = torch.randn(16, 6)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = gate(x)
        torch.manual_seed(0)
        second = gate(x)
    if not isinstance(gate, SigmoidGate):  # whose bias has moved
        assert torch.equal(first.experts, second.experts)
    assert first.experts.shape == first.weights.shape
    assert len(first.experts) == 16
