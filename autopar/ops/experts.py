"""A layer of experts as one op, and its backward: the routing is an input, every shape is fixed by the inputs' shapes.

Tokens x [T, H] go to the experts that `index` [T, K] names, with the weights `scores` [T, K]. Expert e computes
down[e] @ f(up[e, 0] @ x + up_bias[e, 0], ...) + down_bias[e], where f is a pointwise program of up.shape[1] tensors:
up [E, G, F, H], up_bias [E, G, F], down [E, O, F], down_bias [E, O] -> [T, O]. The experts are those numbered from
`first` on: a choice of any other counts nothing, so a rank with some of the experts gives its addend of the result.

The backward computes f's arguments anew from x, or reads those that `experts_keeping` returns beside the result: one
row for each choice of these experts, so how many there are is data.
"""

from __future__ import annotations

from collections.abc import Sequence
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
GRADIENTS = "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor"


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
    parts = [(choices.slot == slot).nonzero()[:, 0] for slot in range(choices.slots)]
    if parts and len(parts[0]) == tokens:  # each token has a choice: the first one is copied
        first = parts.pop(0)
        out = rows.index_select(0, torch.empty_like(first).index_copy_(0, choices.token[first], first))
    else:
        out = rows.new_zeros((tokens, rows.shape[1]))
    for own in parts:
        out.index_add_(0, choices.token[own], rows.index_select(0, own))  # a token is once in a slot
    return out


@dataclass(frozen=True, slots=True)
class Part:
    """Experts that are computed together: their rows, and which of these each has, counted from the first."""

    experts: slice
    rows: slice
    spans: list[tuple[int, int]]


def parts_of(choices: Choices, device: str) -> list[Part]:
    """One expert after the other on a CPU, whose cache holds the rows of one; all at once on any other device."""
    if device == "cpu":
        return [
            Part(slice(number, number + 1), slice(start, end), [(0, end - start)])
            for number, (start, end) in enumerate(choices.spans)
        ]
    return [Part(slice(0, len(choices.spans)), slice(0, len(choices.token)), choices.spans)]


def weights_of(up: Tensor) -> Tensor:
    """[E, G, F, H] as [E, G * F, H]."""
    return up.flatten(1, 2)


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights, in the shapes of the module's docstring, and the choices of its experts."""

    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    choices: Choices

    def arguments(self, rows: Tensor, part: Part, out: Tensor | None = None) -> Tensor:
        """up @ x + up_bias for a part's rows [R, H] of x: [R, G, F]."""
        weights, flat = weights_of(self.up[part.experts]).transpose(1, 2), out if out is None else out.flatten(1)
        values = product(rows, weights, part.spans, out=flat)
        if self.up_bias is not None:
            values += self.up_bias.flatten(1)[self.choices.expert[part.rows]]
        return values.view(-1, *self.up.shape[1:3])

    def result(self, inner: Tensor, part: Part) -> Tensor:
        """down @ f + down_bias for a part's rows [R, F] of f: [R, O]."""
        rows = product(inner, self.down[part.experts].transpose(1, 2), part.spans)
        return rows if self.down_bias is None else rows + self.down_bias[self.choices.expert[part.rows]]

    def weight(self, scores: Tensor, part: Part) -> Tensor:
        """The scores of a part's choices: [R, 1]."""
        return scores[self.choices.token[part.rows], self.choices.column[part.rows], None]


def blocks_of(values: Tensor) -> list[slice]:
    """The rows of [R, G, F] in blocks that a CPU's cache holds; all at once on any other device."""
    count = values.shape[0]
    row_bytes = max(1, values.shape[2] * values.element_size())
    length = max(1, BLOCK_BYTES // row_bytes if values.device.type == "cpu" else count)
    return [slice(start, start + length) for start in range(0, count, length)]


def activated(activation: str, values: Tensor) -> Tensor:
    """The activation of its arguments [R, G, F]: [R, F]."""
    program, out = parse(activation), values.new_empty((values.shape[0], values.shape[2]))
    for block in blocks_of(values):
        program.into([out[block]], *values[block].unbind(1))
    return out


def layer_of(weights: Sequence[Any], index: Tensor, first: int) -> Layer:
    """The layer of (up, up_bias, down, down_bias), whose experts are numbered from `first` on."""
    up, up_bias, down, down_bias = weights
    return Layer(up, up_bias, down, down_bias, choices_of(index, first, up.shape[0]))


def differentiated(gradient: str, values: Tensor, projected: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(slopes f . projected [R] of the activation f; its gradients for weight * projected, by its arguments `values`
    [R, G, F]). The place of `projected` [R, F] is taken by f."""
    program, slopes, out = parse(gradient), projected.new_empty(projected.shape[0]), torch.empty_like(values)
    for block in blocks_of(values):
        grad, own = projected[block], (projected[block] * weight[block]).to(values.dtype)
        result, *_ = program.into([None, *out[block].unbind(1)], *values[block].unbind(1), own)
        torch.sum(grad * result, 1, out=slopes[block])
        grad.copy_(result)
    return slopes, out


@op(f"experts({LAYER}) -> Tensor")
def experts(x: Tensor, index: Tensor, scores: Tensor, *layer: Any) -> Tensor:
    """The sum over each token's choices of score times expert, in x's dtype."""
    *weights, activation, first = layer
    own = layer_of(weights, index, first)
    return _result(x, scores, own, activation, None)


@op(f"experts_keeping({LAYER}, SymInt expected) -> (Tensor, Tensor)")
def experts_keeping(x: Tensor, index: Tensor, scores: Tensor, *layer: Any) -> tuple[Tensor, Tensor]:
    """What `experts` gives, and f's arguments [R, G, F] for the choices of these experts in the order of the experts:
    R is data, plans take it to be `expected`."""
    *weights, activation, first, _ = layer
    own = layer_of(weights, index, first)
    values = x.new_empty((len(own.choices.token), *own.up.shape[1:3]))
    return _result(x, scores, own, activation, values), values


def _result(x: Tensor, scores: Tensor, layer: Layer, activation: str, kept: Tensor | None) -> Tensor:
    """What `experts` gives; `kept` is filled with the arguments of the activation."""
    choices = layer.choices
    rows = x.new_empty((len(choices.token), layer.down.shape[1]), dtype=torch.result_type(x, scores))
    for part in parts_of(choices, x.device.type):
        chosen = x.index_select(0, choices.token[part.rows])
        values = layer.arguments(chosen, part, None if kept is None else kept[part.rows])
        torch.mul(layer.result(activated(activation, values), part), layer.weight(scores, part), out=rows[part.rows])
    return summed_by_token(rows, choices, x.shape[0]).to(x.dtype)


@op(f"experts_backward(Tensor grad, {LAYER}, str gradient, bool[] wanted) -> ({GRADIENTS})")
def experts_backward(grad: Tensor, x: Tensor, index: Tensor, scores: Tensor, *layer: Any) -> tuple[Tensor, ...]:
    """Gradients of x, scores, up, up_bias, down, down_bias; those after x are empty where not `wanted`. `gradient` is
    the program of the activation and its gradients."""
    *weights, _, first, gradient, wanted = layer
    own = layer_of(weights, index, first)
    return _gradients(grad, x, scores, own, Wanted(gradient, wanted, None))


@op(f"experts_backward_kept(Tensor grad, {LAYER}, str gradient, bool[] wanted, Tensor kept) -> ({GRADIENTS})")
def experts_backward_kept(grad: Tensor, x: Tensor, index: Tensor, scores: Tensor, *layer: Any) -> tuple[Tensor, ...]:
    """As `experts_backward`, with the arguments of the activation that `experts_keeping` gave."""
    *weights, _, first, gradient, wanted, kept = layer
    own = layer_of(weights, index, first)
    return _gradients(grad, x, scores, own, Wanted(gradient, wanted, kept))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of a backward: the program of the gradients, which, and what there is of the forward."""

    gradient: str
    which: Sequence[bool]
    kept: Tensor | None


def _gradients(grad: Tensor, x: Tensor, scores: Tensor, layer: Layer, wanted: Wanted) -> tuple[Tensor, ...]:
    """The rows' gradients, part by part, then summed by token."""
    choices, which = layer.choices, wanted.which
    grads = _empty_gradients(x, scores, layer.up, layer.down, which)
    if which[1]:
        grads[1].zero_()  # of the choices of other experts
    rows = x.new_empty((len(choices.token), x.shape[1]))
    for part in parts_of(choices, x.device.type):
        _add_part(grad, x, scores, (layer, part, wanted), (rows, grads))
    grads[0] = summed_by_token(rows, choices, x.shape[0])
    return tuple(grads)


def _add_part(
    grad: Tensor, x: Tensor, scores: Tensor, of: tuple[Layer, Part, Wanted], out: tuple[Tensor, list[Tensor]]
) -> None:
    """With y = down f(z) + b, z = up x: d score = dy . y = (down^T dy) . f + dy . b; df = score down^T dy."""
    (layer, part, wanted), (into, grads) = of, out
    token, column = layer.choices.token[part.rows], layer.choices.column[part.rows]
    chosen, rows = x.index_select(0, token), grad.index_select(0, token)
    values = layer.arguments(chosen, part) if wanted.kept is None else wanted.kept[part.rows]
    weight = layer.weight(scores, part)
    inner = product(rows, layer.down[part.experts], part.spans)
    slopes, found = differentiated(wanted.gradient, values, inner, weight)
    if wanted.which[1]:
        if layer.down_bias is not None:
            slopes = slopes + (rows * layer.down_bias[layer.choices.expert[part.rows]]).sum(1)
        grads[1][token, column] = slopes.to(scores.dtype)
    rows, flat = (rows * weight).to(x.dtype), found.flatten(1)
    if wanted.which[4]:
        outer_product(rows, inner, part.spans, out=grads[4][part.experts])
    if wanted.which[5]:
        grads[5][part.experts] = group_sums(rows, part.spans)
    if wanted.which[2]:
        outer_product(flat, chosen, part.spans, out=weights_of(grads[2])[part.experts])
    if wanted.which[3]:
        grads[3][part.experts] = group_sums(flat, part.spans).view(-1, *layer.up.shape[1:3])
    product(flat, weights_of(layer.up[part.experts]), part.spans, out=into[part.rows])


@fake_of("experts")
def _(x: Tensor, index: Tensor, scores: Tensor, up: Tensor, _: Tensor | None, down: Tensor, *__: object) -> Tensor:
    return x.new_empty((x.shape[0], down.shape[1]))


@fake_of("experts_keeping")
def _(
    x: Tensor, index: Tensor, scores: Tensor, up: Tensor, _: Tensor | None, down: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty((x.shape[0], down.shape[1])), x.new_empty((rest[-1], *up.shape[1:3]))


@fake_of("experts_backward", "experts_backward_kept")
def _(
    grad: Tensor, x: Tensor, index: Tensor, scores: Tensor, up: Tensor, _: Tensor | None, down: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return tuple(_empty_gradients(x, scores, up, down, rest[4]))


def _empty_gradients(x: Tensor, scores: Tensor, up: Tensor, down: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    shapes = (
        (x, x.shape),
        (scores, scores.shape),
        (up, up.shape),
        (up, up.shape[:3]),
        (down, down.shape),
        (down, down.shape[:2]),
    )
    return [
        like.new_empty(shape) if number == 0 or wanted[number] else x.new_empty(0, dtype=torch.float32)
        for number, (like, shape) in enumerate(shapes)
    ]


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
