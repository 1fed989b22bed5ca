"""LSTM, GRU and RNN are captured as a few ops, with PyTorch's values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.interception import Intercepted, assert_capture_matches_eager

KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "deep bidirectional lstm": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "lstm without bias": (nn.LSTM, {"bias": False}),
    "projecting lstm": (nn.LSTM, {"proj_size": 3, "num_layers": 2, "bidirectional": True}),
    "gru": (nn.GRU, {}),
    "deep bidirectional gru": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "gru without bias": (nn.GRU, {"bias": False, "batch_first": True}),
    "rnn": (nn.RNN, {}),
    "relu rnn": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_recurrent_module_is_captured(name: str) -> None:
    kind, options = KINDS[name]
    assert_capture_matches_eager(kind(4, 5, **options), (torch.randn(3, 2, 4),))


def test_given_states_and_unbatched_sequences_work() -> None:
    states = (torch.randn(1, 2, 5), torch.randn(1, 2, 5))
    assert_capture_matches_eager(nn.LSTM(4, 5), (torch.randn(3, 2, 4), states))
    assert_capture_matches_eager(nn.GRU(4, 5), (torch.randn(3, 4),))


def test_the_graph_does_not_grow_with_the_sequence() -> None:
    counts = {
        len(assert_capture_matches_eager(nn.LSTM(4, 5), (torch.randn(times, 2, 4),)).graph_module.graph.nodes)
        for times in (3, 30)
    }
    assert len(counts) == 1


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_are_captured_as_ordinary_ops(cell: Callable[[int, int], nn.Module]) -> None:
    assert_capture_matches_eager(cell(4, 5), (torch.randn(2, 4),))


def test_dropout_between_layers_follows_the_seed() -> None:
    module, x = nn.LSTM(4, 5, 2, dropout=0.5), torch.randn(3, 2, 4)
    values = []
    for seed in (1, 1, 2):
        with Intercepted(seed):
            values.append(module(x)[0])
    assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])
