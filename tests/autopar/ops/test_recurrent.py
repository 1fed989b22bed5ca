"""Recurrences as ops: gradients and PyTorch's demands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autopar.ops  # noqa: F401  (registers the ops)

ops = torch.ops.autopar
BATCH, TIMES, SIZE = 2, 3, 2


def tensors(gates: int) -> tuple[Tensor, ...]:
    """(inputs, hidden, cell, weight, bias)."""
    shapes = ((BATCH, TIMES, gates * SIZE), (BATCH, SIZE), (BATCH, SIZE), (gates * SIZE, SIZE), (gates * SIZE,))
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


def calls() -> dict[str, tuple[Any, ...]]:
    inputs, hidden, cell, weight, _ = tensors(4)
    gru_inputs, _, _, gru_weight, bias = tensors(3)
    plain, _, _, plain_weight, _ = tensors(1)
    return {
        "lstm_scan": (inputs, hidden, cell, weight),
        "gru_scan": (gru_inputs, hidden, gru_weight, bias),
        "rnn_scan": (plain, hidden, plain_weight, "tanh"),
    }


def backward_calls() -> dict[str, tuple[Any, ...]]:
    forward = {
        name: tuple(item.detach() if isinstance(item, Tensor) else item for item in args)
        for name, args in calls().items()
    }
    _, hidden, cell, weight = forward["lstm_scan"]
    hiddens, cells, gates = ops.lstm_scan(*forward["lstm_scan"])
    gru_hiddens, gru_gates = ops.gru_scan(*forward["gru_scan"])
    plain = ops.rnn_scan(*forward["rnn_scan"])
    return {
        "lstm_scan_backward": (hiddens.sin(), cells.sin(), cells, gates, cell, weight),
        "gru_scan_backward": (gru_hiddens.sin(), gru_hiddens, gru_gates, hidden, forward["gru_scan"][2]),
        "rnn_scan_backward": (plain.sin(), plain, *forward["rnn_scan"][2:]),
    }


@pytest.mark.parametrize("name", ["lstm_scan", "gru_scan", "rnn_scan"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    args = calls()[name]
    options = [item for item in args if isinstance(item, str)]

    def first_outputs(*tensors: Tensor) -> Any:
        outputs = getattr(ops, name)(*tensors, *options)
        return outputs[:2] if name == "lstm_scan" else outputs[0] if name == "gru_scan" else outputs

    torch.autograd.gradcheck(first_outputs, tuple(item for item in args if isinstance(item, Tensor)))


@pytest.mark.parametrize("name", ["lstm_scan", "gru_scan", "rnn_scan"])
def test_the_ops_are_registered_as_pytorch_demands(name: str) -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(ops, name).default, calls()[name], test_utils=checks)
    backward = f"{name}_backward"
    overload = getattr(ops, backward).default
    torch.library.opcheck(overload, backward_calls()[backward], test_utils=("test_schema", "test_faketensor"))
