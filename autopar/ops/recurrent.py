"""Recurrences over a sequence as single ops: what of an LSTM, a GRU or an RNN cannot be batched over time.

Sequences are [batch, time, features]. `inputs` are the gates' inputs, with the biases that can be added beforehand;
`weight` multiplies the hidden state. Gates stand in PyTorch's order. The gradient of `weight` is an ordinary product
outside these ops, so that they shard the batch without a sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops.define import differentiate, fake_of, op

RELU = "relu"


def like_time(sequence: Tensor, features: int) -> Tensor:
    """An empty sequence of other features."""
    return sequence.new_empty((*sequence.shape[:2], features))


@op("lstm_scan(Tensor inputs, Tensor hidden, Tensor cell, Tensor weight) -> (Tensor, Tensor, Tensor)")
def lstm_scan(inputs: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden states, cells, gates) at every time, from the states before the first."""
    size = hidden.shape[1]
    hiddens, cells, gates = like_time(inputs, size), like_time(inputs, size), like_time(inputs, 4 * size)
    for time in range(inputs.shape[1]):
        now = torch.addmm(inputs[:, time], hidden, weight.t())
        now[:, : 2 * size].sigmoid_()
        now[:, 2 * size : 3 * size].tanh_()
        now[:, 3 * size :].sigmoid_()
        enter, forget, new, leave = now.chunk(4, 1)
        cell = forget * cell + enter * new
        hidden = leave * cell.tanh()
        hiddens[:, time], cells[:, time], gates[:, time] = hidden, cell, now
    return hiddens, cells, gates


@op(
    "lstm_scan_backward(Tensor grad_hiddens, Tensor? grad_cells, Tensor cells, Tensor gates, Tensor cell, "
    "Tensor weight) -> (Tensor, Tensor, Tensor)"
)
def lstm_scan_backward(
    grad_hiddens: Tensor, grad_cells: Tensor | None, cells: Tensor, gates: Tensor, cell: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of inputs, hidden and cell."""
    grad_inputs = torch.empty_like(gates, memory_format=torch.contiguous_format)
    grad_hidden, grad_cell = torch.zeros_like(cell), torch.zeros_like(cell)
    for time in reversed(range(gates.shape[1])):
        enter, forget, new, leave = gates[:, time].chunk(4, 1)
        before = cells[:, time - 1] if time else cell
        grad_hidden = grad_hidden + grad_hiddens[:, time]
        squashed = cells[:, time].tanh()
        grad_cell = grad_cell + grad_hidden * leave * (1 - squashed.square())
        if grad_cells is not None:
            grad_cell = grad_cell + grad_cells[:, time]
        parts = (
            grad_cell * new * enter * (1 - enter),
            grad_cell * before * forget * (1 - forget),
            grad_cell * enter * (1 - new.square()),
            grad_hidden * squashed * leave * (1 - leave),
        )
        now = torch.cat(parts, 1)
        grad_inputs[:, time] = now
        grad_hidden, grad_cell = now @ weight, grad_cell * forget
    return grad_inputs, grad_hidden, grad_cell


@op("gru_scan(Tensor inputs, Tensor hidden, Tensor weight, Tensor? bias) -> (Tensor, Tensor)")
def gru_scan(inputs: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(hidden states, gates with the hidden state's share of the new gate behind them) at every time."""
    size = hidden.shape[1]
    hiddens, gates = like_time(inputs, size), like_time(inputs, 4 * size)
    for time in range(inputs.shape[1]):
        own = hidden @ weight.t() if bias is None else torch.addmm(bias, hidden, weight.t())
        reset, update = (inputs[:, time, : 2 * size] + own[:, : 2 * size]).sigmoid_().chunk(2, 1)
        share = own[:, 2 * size :]
        new = (inputs[:, time, 2 * size :] + reset * share).tanh_()
        hidden = new + update * (hidden - new)
        hiddens[:, time], gates[:, time] = hidden, torch.cat((reset, update, new, share), 1)
    return hiddens, gates


@op(
    "gru_scan_backward(Tensor grad_hiddens, Tensor hiddens, Tensor gates, Tensor hidden, Tensor weight) "
    "-> (Tensor, Tensor, Tensor)"
)
def gru_scan_backward(
    grad_hiddens: Tensor, hiddens: Tensor, gates: Tensor, hidden: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of inputs, of the hidden state's products with `weight`, and of hidden."""
    size = hidden.shape[1]
    grad_inputs, grad_products = like_time(gates, 3 * size), like_time(gates, 3 * size)
    grad_hidden = torch.zeros_like(hidden)
    for time in reversed(range(gates.shape[1])):
        reset, update, new, share = gates[:, time].chunk(4, 1)
        before = hiddens[:, time - 1] if time else hidden
        grad_hidden = grad_hidden + grad_hiddens[:, time]
        grad_new = grad_hidden * (1 - update) * (1 - new.square())
        grad_reset = grad_new * share * reset * (1 - reset)
        grad_update = grad_hidden * (before - new) * update * (1 - update)
        products = torch.cat((grad_reset, grad_update, grad_new * reset), 1)
        grad_inputs[:, time] = torch.cat((grad_reset, grad_update, grad_new), 1)
        grad_products[:, time] = products
        grad_hidden = grad_hidden * update + products @ weight
    return grad_inputs, grad_products, grad_hidden


@op("rnn_scan(Tensor inputs, Tensor hidden, Tensor weight, str activation) -> Tensor")
def rnn_scan(inputs: Tensor, hidden: Tensor, weight: Tensor, activation: str) -> Tensor:
    """Hidden states at every time; `activation` is "tanh" or "relu"."""
    hiddens = like_time(inputs, hidden.shape[1])
    for time in range(inputs.shape[1]):
        now = torch.addmm(inputs[:, time], hidden, weight.t())
        hidden = now.relu_() if activation == RELU else now.tanh_()
        hiddens[:, time] = hidden
    return hiddens


@op("rnn_scan_backward(Tensor grad_hiddens, Tensor hiddens, Tensor weight, str activation) -> (Tensor, Tensor)")
def rnn_scan_backward(grad_hiddens: Tensor, hiddens: Tensor, weight: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of inputs and hidden."""
    grad_inputs = like_time(hiddens, hiddens.shape[2])
    grad_hidden = torch.zeros_like(grad_inputs[:, 0])
    for time in reversed(range(hiddens.shape[1])):
        now = hiddens[:, time]
        slope = (now > 0).to(now.dtype) if activation == RELU else 1 - now.square()
        grad = (grad_hidden + grad_hiddens[:, time]) * slope
        grad_inputs[:, time] = grad
        grad_hidden = grad @ weight
    return grad_inputs, grad_hidden


@fake_of("lstm_scan")
def _(inputs: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    size = hidden.shape[1]
    return like_time(inputs, size), like_time(inputs, size), like_time(inputs, 4 * size)


@fake_of("lstm_scan_backward")
def _(
    grad_hiddens: Tensor, grad_cells: Tensor | None, cells: Tensor, gates: Tensor, cell: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    state = cell.new_empty(cell.shape)
    return gates.new_empty(gates.shape), state, torch.empty_like(state)


@fake_of("gru_scan")
def _(inputs: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return like_time(inputs, hidden.shape[1]), like_time(inputs, 4 * hidden.shape[1])


@fake_of("gru_scan_backward")
def _(
    grad_hiddens: Tensor, hiddens: Tensor, gates: Tensor, hidden: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    size = hidden.shape[1]
    return like_time(gates, 3 * size), like_time(gates, 3 * size), hidden.new_empty(hidden.shape)


@fake_of("rnn_scan")
def _(inputs: Tensor, hidden: Tensor, weight: Tensor, activation: str) -> Tensor:
    return like_time(inputs, hidden.shape[1])


@fake_of("rnn_scan_backward")
def _(grad_hiddens: Tensor, hiddens: Tensor, weight: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return hiddens.new_empty(hiddens.shape), hiddens.new_empty((hiddens.shape[0], hiddens.shape[2]))


def weight_gradient(grad_products: Tensor, hiddens: Tensor, hidden: Tensor) -> Tensor:
    """Of the weight that multiplies each time's hidden state before it."""
    before = torch.cat((hidden[:, None], hiddens[:, :-1]), 1)
    return grad_products.flatten(0, 1).t() @ before.flatten(0, 1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    outputs = output if isinstance(output, tuple) else (output,)
    ctx.options = [item for item in inputs if isinstance(item, str)]
    tensors = [item for item in inputs if not isinstance(item, str)]
    ctx.inputs = len(tensors)
    ctx.save_for_backward(*tensors, *outputs)
    ctx.set_materialize_grads(False)


def _lstm_backward(ctx: Any, grad_hiddens: Tensor | None, grad_cells: Tensor | None, _: object) -> Any:
    _, hidden, cell, weight, hiddens, cells, gates = ctx.saved_tensors
    grad_hiddens = torch.zeros_like(hiddens) if grad_hiddens is None else grad_hiddens
    scan = torch.ops.autopar.lstm_scan_backward
    grad_inputs, grad_hidden, grad_cell = scan(grad_hiddens, grad_cells, cells, gates, cell, weight)
    return grad_inputs, grad_hidden, grad_cell, weight_gradient(grad_inputs, hiddens, hidden)


def _gru_backward(ctx: Any, grad_hiddens: Tensor | None, _: object) -> Any:
    if grad_hiddens is None:
        return None, None, None, None
    _, hidden, weight, bias, hiddens, gates = ctx.saved_tensors
    scan = torch.ops.autopar.gru_scan_backward
    grad_inputs, grad_products, grad_hidden = scan(grad_hiddens, hiddens, gates, hidden, weight)
    grad_bias = None if bias is None else grad_products.sum((0, 1))
    return grad_inputs, grad_hidden, weight_gradient(grad_products, hiddens, hidden), grad_bias


def _rnn_backward(ctx: Any, grad_hiddens: Tensor | None) -> Any:
    if grad_hiddens is None:
        return None, None, None, None
    _, hidden, weight, hiddens = ctx.saved_tensors
    grad_inputs, grad_hidden = torch.ops.autopar.rnn_scan_backward(grad_hiddens, hiddens, weight, *ctx.options)
    return grad_inputs, grad_hidden, weight_gradient(grad_inputs, hiddens, hidden), None


differentiate("lstm_scan", _lstm_backward, _save)
differentiate("gru_scan", _gru_backward, _save)
differentiate("rnn_scan", _rnn_backward, _save)
