"""LSTM, GRU and RNN: a product over all times, then one op for the recurrence, per layer and direction."""

# Parameters are named, and pass flags, as those of the torch functions do.
# ruff: noqa: A002, FBT001

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.capture.replacements.attention import autocast
from autopar.capture.replacements.draw import Draw
from autopar.capture.replacements.randomness import dropped

Weights = Sequence[Tensor]  # of one layer and direction: input, hidden, and their biases if it has them
Direction = Callable[[Tensor, list[Tensor], Weights], tuple[Tensor, list[Tensor]]]
ops = torch.ops.autopar


def projected(x: Tensor, weights: Weights) -> Tensor:
    """The gates' inputs, biases included."""
    return F.linear(x, weights[0], weights[2] + weights[3] if len(weights) > 2 else None)


def lstm_direction(x: Tensor, states: list[Tensor], weights: Weights) -> tuple[Tensor, list[Tensor]]:
    hiddens, cells, _ = ops.lstm_scan(projected(x, weights), states[0], states[1], weights[1])
    return hiddens, [hiddens[:, -1], cells[:, -1]]


def projecting_lstm_direction(x: Tensor, states: list[Tensor], weights: Weights) -> tuple[Tensor, list[Tensor]]:
    """An LSTM whose hidden state is projected: unrolled in ordinary ops."""
    *weights, projection = weights
    inputs = projected(x, weights)
    hidden, cell = states
    hiddens = []
    for time in range(x.shape[1]):
        gates = inputs[:, time] + F.linear(hidden, weights[1])
        enter, forget, new, leave = gates.chunk(4, 1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        hidden = F.linear(leave.sigmoid() * cell.tanh(), projection)
        hiddens.append(hidden)
    return torch.stack(hiddens, 1), [hidden, cell]


def gru_direction(x: Tensor, states: list[Tensor], weights: Weights) -> tuple[Tensor, list[Tensor]]:
    """The hidden bias stays inside: the reset gate multiplies it."""
    input_bias, hidden_bias = weights[2:4] if len(weights) > 2 else (None, None)
    hiddens, _ = ops.gru_scan(F.linear(x, weights[0], input_bias), states[0], weights[1], hidden_bias)
    return hiddens, [hiddens[:, -1]]


def rnn_direction(activation: str, x: Tensor, states: list[Tensor], weights: Weights) -> tuple[Tensor, list[Tensor]]:
    hiddens = ops.rnn_scan(projected(x, weights), states[0], weights[1], activation)
    return hiddens, [hiddens[:, -1]]


def recurrent(direction: Direction, states: int) -> Callable[..., Any]:
    """The replacement of `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu` on padded sequences."""

    def replacement(
        draw: Draw,
        input: Tensor,
        hx: Any,
        params: Any,
        has_biases: Any,
        num_layers: Any,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool | None = None,
    ) -> Any:
        if not isinstance(has_biases, bool) or batch_first is None:
            return NotImplemented  # a packed sequence: its lengths are data
        first = list(hx) if states > 1 else [hx]
        forms: Direction = direction
        if states > 1 and first[0].shape[2] != first[1].shape[2]:
            forms = projecting_lstm_direction
        x = input if batch_first else input.transpose(0, 1)
        x, *first = autocast((x, *first))
        layers = _layers(autocast(tuple(params)), num_layers * (2 if bidirectional else 1))
        last: list[list[Tensor]] = []
        for layer in range(num_layers):
            if layer and dropout and train:
                x = dropped(draw, x, dropout, x.shape)
            x = _both_ways(forms, x, first, layers, last) if bidirectional else _one_way(forms, x, first, layers, last)
        ends = [torch.stack([item[state] for item in last]) for state in range(states)]
        return (x if batch_first else x.transpose(0, 1), *ends)

    return replacement


def _layers(params: Sequence[Tensor], directions: int) -> list[Weights]:
    each = len(params) // directions
    return [params[start : start + each] for start in range(0, len(params), each)]


def _one_way(
    direction: Direction, x: Tensor, first: list[Tensor], layers: list[Weights], last: list[list[Tensor]]
) -> Tensor:
    """Run the next direction, whose number is how many have run, and note its last states."""
    number = len(last)
    x, ends = direction(x, [state[number] for state in first], layers[number])
    last.append(ends)
    return x


def _both_ways(
    direction: Direction, x: Tensor, first: list[Tensor], layers: list[Weights], last: list[list[Tensor]]
) -> Tensor:
    forward = _one_way(direction, x, first, layers, last)
    backward = _one_way(direction, x.flip(1), first, layers, last).flip(1)
    return torch.cat((forward, backward), -1)


RECURRENT_REPLACEMENTS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: recurrent(lstm_direction, 2),
    torch.gru: recurrent(gru_direction, 1),
    torch.rnn_tanh: recurrent(partial(rnn_direction, "tanh"), 1),
    torch.rnn_relu: recurrent(partial(rnn_direction, "relu"), 1),
}
