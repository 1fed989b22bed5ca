"""A layer of experts as one op, and its backward: the routing is an input, every shape is fixed by the inputs' shapes.

Tokens x [T, H] go to the experts that `index` [T, K] names, with the weights `scores` [T, K]. Expert e computes
down[e] @ f(up[e, 0] @ x + up_bias[e, 0], ...) + down_bias[e], where f is a pointwise program of up.shape[1] tensors:
up [E, G, F, H], up_bias [E, G, F], down [E, O, F], down_bias [E, O] -> [T, O]. The experts are those numbered from
`first` on: a choice of any other counts nothing, so a rank with some of the experts gives its addend of the result.

The backward computes f's arguments anew from x: nothing is kept that depends on how many tokens an expert got.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ops.define import differentiate, fake_of, op
from autopar.ops.grouped import group_sums, outer_product, product, spans
from autopar.ops.pointwise_program import gradient_text, parse
from autopar.torch_compat import outside_tracing

BLOCK_BYTES = 1 << 19  # of one hidden tensor: so many rows at a time a CPU has in its cache from one op to the next

LAYER = (
    "Tensor x, Tensor index, Tensor scores, Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias, "
    "str activation, SymInt first"
)


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices of these experts in the order of the experts: R rows, each a token and the expert that it chose."""

    token: Tensor  # [R]
    column: Tensor  # [R], of `index`
    expert: Tensor  # [R], counted from `first`
    slot: Tensor  # [R], which of its token's choices among these experts
    spans: list[tuple[int, int]]  # per expert, its rows
    slots: int  # the most choices of one token


def choices_of(index: Tensor, first: int, experts: int) -> Choices:
    """Sorts the choices by expert; equal inputs give the same order on every device."""
    own = (index >= first) & (index < first + experts)
    number = torch.where(own, index - first, experts).flatten()
    order = torch.argsort(number, stable=True)
    groups = spans(torch.bincount(number, minlength=experts + 1).cumsum(0), 0, experts)
    order = order[: groups[-1][1] if groups else 0]
    slot = (own.cumsum(1) - 1).flatten()[order]
    token, column = order // index.shape[1], order % index.shape[1]
    return Choices(token, column, number[order], slot, groups, int(own.sum(1).max()) if own.numel() else 0)


def summed_by_token(rows: Tensor, choices: Choices, tokens: int) -> Tensor:
    """[R, N] -> [tokens, N], in the order of each token's choices: the same bits on every rank and device."""
    out = rows.new_zeros((tokens, rows.shape[1]))
    for slot in range(choices.slots):
        (own,) = (choices.slot == slot).nonzero(as_tuple=True)
        out.index_add_(0, choices.token[own], rows.index_select(0, own))  # a token is once in a slot
    return out


def weights_of(up: Tensor) -> Tensor:
    """[E, G, F, H] as [E, G * F, H]."""
    return up.flatten(1, 2)


def arguments_of_activation(rows: Tensor, up: Tensor, up_bias: Tensor | None, choices: Choices) -> Tensor:
    """up @ x + up_bias for the rows [R, H] of x: [R, G, F]."""
    values = product(rows, weights_of(up).transpose(1, 2), choices.spans)
    if up_bias is not None:
        values = values + up_bias.flatten(1)[choices.expert]
    return values.view(-1, *up.shape[1:3])


def blocks_of(values: Tensor) -> list[slice]:
    """The rows of [R, G, F] in blocks that a CPU's cache holds; all at once on any other device."""
    count = values.shape[0]
    row_bytes = max(1, values.shape[2] * values.element_size())
    length = max(1, BLOCK_BYTES // row_bytes if values.device.type == "cpu" else count)
    return [slice(start, start + length) for start in range(0, count, length)]


def weighted(rows: Tensor, weight: Tensor) -> Tensor:
    """[R, N] times [R, 1], in the wider of their dtypes; `rows` may be written to."""
    return rows.mul_(weight) if torch.result_type(rows, weight) == rows.dtype else rows * weight


def activated(activation: str, values: Tensor) -> Tensor:
    """The activation of its arguments [R, G, F]: [R, F]."""
    program, out = parse(activation), values.new_empty((values.shape[0], values.shape[2]))
    for block in blocks_of(values):
        (out[block],) = program(*values[block].unbind(1))
    return out


def differentiated(gradient: str, values: Tensor, projected: Tensor, weight: Tensor) -> Tensor:
    """Slopes f . projected [R] of the activation f; its gradients for weight * projected take the place of its
    arguments `values` [R, G, F], and f that of `projected` [R, F]."""
    program, slopes = parse(gradient), projected.new_empty(projected.shape[0])
    for block in blocks_of(values):
        grad, arguments = projected[block], values[block].unbind(1)
        result, *grads = program(*arguments, (grad * weight[block]).to(values.dtype))
        torch.sum(grad * result, 1, out=slopes[block])
        grad.copy_(result)
        for argument, found in zip(arguments, grads, strict=True):
            argument.copy_(found)
    return slopes


@op(f"experts({LAYER}) -> Tensor")
def experts(x: Tensor, index: Tensor, scores: Tensor, *layer: Any) -> Tensor:
    """The sum over each token's choices of score times expert, in x's dtype."""
    up, up_bias, down, down_bias, activation, first = layer
    choices = choices_of(index, first, up.shape[0])
    inner = activated(activation, arguments_of_activation(x.index_select(0, choices.token), up, up_bias, choices))
    rows = product(inner, down.transpose(1, 2), choices.spans)
    if down_bias is not None:
        rows = rows + down_bias[choices.expert]
    rows = weighted(rows, scores[choices.token, choices.column, None])
    return summed_by_token(rows, choices, x.shape[0]).to(x.dtype)


@op(
    f"experts_backward(Tensor grad, {LAYER}, str gradient, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def experts_backward(grad: Tensor, x: Tensor, index: Tensor, scores: Tensor, *layer: Any) -> tuple[Tensor, ...]:
    """Gradients of x, scores, up, up_bias, down, down_bias; those after x are empty where not `wanted`. `gradient` is
    the program of the activation and its gradients.

    With y = down f(z) + b, z = up x: d score = dy . y = (down^T dy) . f + dy . b; df = score down^T dy.
    """
    up, up_bias, down, down_bias, _, first, gradient, wanted = layer
    choices = choices_of(index, first, up.shape[0])
    chosen, rows = x.index_select(0, choices.token), grad.index_select(0, choices.token)
    values = arguments_of_activation(chosen, up, up_bias, choices)
    weight = scores[choices.token, choices.column, None]
    inner = product(rows, down, choices.spans)
    slopes = differentiated(gradient, values, inner, weight)
    grads = [torch.empty(0) for _ in range(6)]
    if wanted[1]:
        if down_bias is not None:
            slopes = slopes + (rows * down_bias[choices.expert]).sum(1)
        grads[1] = torch.zeros_like(scores)
        grads[1][choices.token, choices.column] = slopes.to(scores.dtype)
    rows, flat = weighted(rows, weight).to(x.dtype), values.flatten(1)
    if wanted[4]:
        grads[4] = outer_product(rows, inner, choices.spans)
    if wanted[5]:
        grads[5] = group_sums(rows, choices.spans)
    if wanted[2]:
        grads[2] = outer_product(flat, chosen, choices.spans).view(up.shape)
    if wanted[3]:
        grads[3] = group_sums(flat, choices.spans).view(up.shape[:3])
    grads[0] = summed_by_token(product(flat, weights_of(up), choices.spans), choices, x.shape[0])
    return tuple(item.to(x.device) for item in grads)


@fake_of("experts")
def _(x: Tensor, index: Tensor, scores: Tensor, up: Tensor, _: Tensor | None, down: Tensor, *__: object) -> Tensor:
    return x.new_empty((x.shape[0], down.shape[1]))


@fake_of("experts_backward")
def _(
    grad: Tensor, x: Tensor, index: Tensor, scores: Tensor, up: Tensor, _: Tensor | None, down: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    wanted = rest[-1]
    shapes = (
        (x, x.shape),
        (scores, scores.shape),
        (up, up.shape),
        (up, up.shape[:3]),
        (down, down.shape),
        (down, down.shape[:2]),
    )
    return tuple(
        like.new_empty(shape) if index == 0 or wanted[index] else x.new_empty(0, dtype=torch.float32)
        for index, (like, shape) in enumerate(shapes)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, index, scores, up, up_bias, down, down_bias, activation, first = inputs
    ctx.save_for_backward(x, index, scores, up, up_bias, down, down_bias)
    ctx.how = activation, first


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, index, *others = ctx.saved_tensors
    needed = [ctx.needs_input_grad[place] for place in (0, 2, 3, 4, 5, 6)]
    activation, _ = ctx.how
    with outside_tracing():
        gradient = gradient_text(activation, others[1].shape[1], x.dtype)
    grads = torch.ops.autopar.experts_backward(grad, x, index, *others, *ctx.how, gradient, needed)
    found = [item if need else None for item, need in zip(grads, needed, strict=True)]
    return (found[0], None, *found[1:], None, None)


differentiate("experts", _backward, _save)
