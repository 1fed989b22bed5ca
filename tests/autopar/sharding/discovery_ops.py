"""Ops of a user's library, without rules: some that can be cut, some that only look as if they could."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def like_first(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def define(function: Callable[..., Any], fake: Callable[..., Any] = like_first, **options: Any) -> Any:
    """The overload of a new op `discovery_test::NAME`."""
    op = torch.library.custom_op(f"discovery_test::{function.__name__}", function, mutates_args=(), **options)
    op.register_fake(fake)
    return getattr(torch.ops.discovery_test, function.__name__).default


def gated(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def projection(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.T + bias


def lookup(table: Tensor, rows: Tensor) -> Tensor:
    return table[rows]


def rows_added(values: Tensor, rows: Tensor, count: int) -> Tensor:
    made = values.new_zeros(count, values.shape[-1])
    return made.index_add(0, rows.flatten(), values.flatten(0, -2))


def by_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).softmax(-1).flatten(-2).clone()


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(0), x.amax(0)


gated_op = define(gated)
attention_op = define(attention, lambda q, k, v: q.new_empty(*q.shape[:-1], v.shape[-1]))
projection_op = define(projection, lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]))
lookup_op = define(lookup, lambda table, rows: table.new_empty(*rows.shape, *table.shape[1:]))
by_heads_op = define(by_heads)
rows_added_op = define(rows_added, lambda values, rows, count: values.new_empty(count, values.shape[-1]))
statistics_op = define(statistics, lambda x: (x.new_empty(x.shape[1:]), x.new_empty(x.shape[1:])))


# In each of these, rows look independent of each other, and are not.
def by_count(x: Tensor) -> Tensor:
    return torch.relu(x) / x.numel()


def by_length(x: Tensor) -> Tensor:
    return torch.relu(x) * (1 + 1 / x.shape[0])


def by_maximum(x: Tensor) -> Tensor:
    return torch.relu(x) / x.abs().max()


def by_norm_if_long(x: Tensor) -> Tensor:
    return torch.relu(x) * (1 / x.norm()).clamp(max=1.0)


def by_sign_of_sum(x: Tensor) -> Tensor:
    return torch.relu(x) * x.sum().sign()


def by_presence_of_nan(x: Tensor) -> Tensor:
    return torch.relu(x) if x.isfinite().all() else torch.zeros_like(x)


def by_presence_of_outliers(x: Tensor) -> Tensor:
    return torch.relu(x) if (x.abs() < 1e3).all() else torch.relu(x) / 2


def by_parity(x: Tensor) -> Tensor:
    signs = 1 - 2 * (torch.arange(x.shape[0]) % 2)
    return torch.relu(x) * signs.to(x)[:, None]


def by_thirds(x: Tensor) -> Tensor:
    return torch.relu(x) * (1 + torch.arange(x.shape[0]) % 3).to(x)[:, None]


def by_position(x: Tensor) -> Tensor:
    return torch.relu(x) * torch.arange(x.shape[0]).to(x)[:, None]


def reversed_rows(x: Tensor) -> Tensor:
    return torch.relu(x).flip(0)


def rolled(x: Tensor, shift: int) -> Tensor:
    return torch.relu(x).roll(shift, 0)


def accumulated(x: Tensor) -> Tensor:
    return torch.relu(x).cumsum(0)


def sorted_rows(x: Tensor) -> Tensor:
    return torch.relu(x).sort(0).values


def windows(x: Tensor) -> Tensor:
    return torch.relu(x[:-1] + x[1:])


def pairs(x: Tensor) -> Tensor:
    return torch.relu(x[::2])


def first_row_apart(x: Tensor) -> Tensor:
    return torch.cat((x[:1] * 2, x[1:])).relu()


def first_rows_apart(x: Tensor) -> Tensor:
    """Beyond the lengths of the small trials: only the real ones can tell."""
    return torch.cat((x[:150], x[150:] * 2)).relu()


def long_differs(x: Tensor) -> Tensor:
    return torch.relu(x) if x.shape[0] < 128 else torch.relu(x) / x.abs().max()


def half(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0] // 2, *x.shape[1:])


TRAPS = {
    define(function, fake): args
    for function, fake, *args in (
        (by_count, like_first),
        (by_length, like_first),
        (by_maximum, like_first),
        (by_norm_if_long, like_first),
        (by_sign_of_sum, like_first),
        (by_presence_of_nan, like_first),
        (by_presence_of_outliers, like_first),
        (by_parity, like_first),
        (by_thirds, like_first),
        (by_position, like_first),
        (reversed_rows, like_first),
        (rolled, like_first, 3),
        (accumulated, like_first),
        (sorted_rows, like_first),
        (windows, lambda x: x.new_empty(x.shape[0] - 1, *x.shape[1:])),
        (pairs, half),
        (first_row_apart, like_first),
        (first_rows_apart, like_first),
        (long_differs, like_first),
    )
}


# Ops of which no two runs, or not all of them, are alike.
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def counting(x: Tensor) -> Tensor:
    return x + next(_COUNT)


def legacy_noise(x: Tensor) -> Tensor:
    import random

    return x * random.random()


def _numbers() -> Iterator[int]:
    yield from range(1, 10**9)


_COUNT = _numbers()
RANDOM = tuple(map(define, (noisy, counting, legacy_noise)))


def careless_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Its fake takes the values to be as wide as the queries: shards of them are not."""
    return attention(q, k, v)


careless_attention_op = define(careless_attention)


# What a model uses: forward and backward are ops of their own.
def smooth_gate(x: Tensor, scale: Tensor) -> Tensor:
    return torch.tanh(x) * scale


def smooth_gate_backward(grad: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    tanh = torch.tanh(x)
    return grad * scale * (1 - tanh * tanh), (grad * tanh).flatten(0, -2).sum(0)


smooth_gate_op = define(smooth_gate)
smooth_gate_backward_op = define(
    smooth_gate_backward, lambda grad, x, scale: (x.new_empty(x.shape), scale.new_empty(scale.shape))
)
torch.library.register_autograd(
    "discovery_test::smooth_gate",
    lambda ctx, grad: smooth_gate_backward_op(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def values_above(x: Tensor) -> Tensor:
    return x[x > 0].clone()


def _values_above(x: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


values_above_op = define(values_above, _values_above)
