"""A layer of experts against a loop over choices, under autograd; its rules on shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import autopar.ops  # noqa: F401  (registers the ops)
from autopar.ops.experts import BLOCK_BYTES, activated, blocks_of, differentiated
from autopar.ops.pointwise_program import NotPointwiseError, gradient_text, parse, text_of
from autopar.sharding.execution import call_in, fake_calls_of, run_sharded, trace_op
from autopar.sharding.registry import rules_of
from autopar.sharding.rules.experts import ALL_TO_ALL, INSIDE, OWN_EXPERTS
from autopar.sharding.strategies import strategies_of
from tests.autopar.sharding.rules.test_custom import assert_every_rule_holds

ops = torch.ops.autopar
F64 = torch.float64
TOKENS, CHOICES, EXPERTS, HIDDEN, INNER, OUT = 6, 2, 6, 4, 12, 6


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
    return (up + 1) * (gate * torch.sigmoid(1.7 * gate))


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x, inplace=True).square()


ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "swiglu": (swiglu, 2),
    "clamped": (clamped, 2),
    "squared relu": (squared_relu, 1),
    "first of two": (lambda gate, up: gate.tanh(), 2),
}


def layer(activation: str = "swiglu", *, biased: bool = True, index: Tensor | None = None) -> tuple[Any, ...]:
    """Arguments of the op; some choices name no expert."""
    torch.manual_seed(0)
    function, inputs = ACTIVATIONS[activation]
    if index is None:
        index = torch.rand(TOKENS, EXPERTS).argsort(1)[:, :CHOICES]
        index[1, 0], index[2] = EXPERTS, EXPERTS
    x, scores = torch.randn(TOKENS, HIDDEN, dtype=F64), torch.rand(index.shape, dtype=F64)
    up, down = torch.randn(EXPERTS, inputs, INNER, HIDDEN, dtype=F64), torch.randn(EXPERTS, OUT, INNER, dtype=F64)
    biases = torch.randn(EXPERTS, inputs, INNER, dtype=F64), torch.randn(EXPERTS, OUT, dtype=F64)
    up_bias, down_bias = biases if biased else (None, None)
    return x, index, scores, up, up_bias, down, down_bias, text_of(function, inputs, F64), 0


def by_a_loop(activation: str, *args: Any) -> Tensor:
    x, index, scores, up, up_bias, down, down_bias, *_ = args
    rows = []
    for token in range(x.shape[0]):
        row = x.new_zeros(down.shape[1])
        for column, expert in enumerate(index[token].tolist()):
            if expert < up.shape[0]:
                inner = up[expert] @ x[token]
                inner = inner if up_bias is None else inner + up_bias[expert]
                result = down[expert] @ ACTIVATIONS[activation][0](*(item.clone() for item in inner))
                row = row + scores[token, column] * (result if down_bias is None else result + down_bias[expert])
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", [True, False], ids=["biased", "unbiased"])
def test_the_op_and_its_gradients_are_those_of_a_loop(activation: str, biased: bool) -> None:
    args = layer(activation, biased=biased)
    leaves = [item for item in args if isinstance(item, Tensor) and item.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    found, expected = ops.experts(*args), by_a_loop(activation, *args)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, grad)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, grad), wanted)


def test_hidden_rows_that_no_cache_holds_together_are_computed_one_block_after_the_other() -> None:
    values = torch.randn(5, 2, BLOCK_BYTES // 16, dtype=F64)  # two rows in a block
    assert [values[block].shape[0] for block in blocks_of(values)] == [2, 2, 1]
    assert blocks_of(values.to("meta")) == [slice(0, 5)]  # no cache of a CPU's to fit in
    text, leaves = text_of(swiglu, 2, F64), [item.clone().requires_grad_() for item in values.unbind(1)]
    expected = swiglu(*leaves)
    torch.testing.assert_close(activated(text, values), expected)
    projected, weight = torch.randn_like(expected), torch.rand(5, 1, dtype=F64)
    grads = torch.autograd.grad(expected, leaves, projected * weight)
    inner, before, slopes = projected.clone(), values.clone(), (projected * expected).sum(1)
    found = differentiated(gradient_text(text, 2, F64), values, inner, weight)
    torch.testing.assert_close((found[0], *found[1].unbind(1), inner), (slopes, *grads, expected))
    assert torch.equal(values, before)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_backward_that_reads_what_the_forward_kept_gives_the_same_gradients(activation: str, biased: bool) -> None:
    args, wanted = layer(activation, biased=biased), [True, True, True, biased, True, biased]
    gradient = gradient_text(args[-2], args[3].shape[1], F64)
    found, kept = ops.experts_keeping(*args, 0)
    torch.testing.assert_close(found, ops.experts(*args), rtol=0, atol=0)
    grad, before = torch.randn_like(found), kept.clone()
    grads = ops.experts_backward_kept(grad, *args, gradient, wanted, kept)
    torch.testing.assert_close(grads, ops.experts_backward(grad, *args, gradient, wanted))
    assert torch.equal(kept, before)  # a second backward may read it


def test_frozen_weights_get_no_gradient_and_others_do() -> None:
    args = layer()
    args[0].requires_grad_()
    args[3].requires_grad_()
    found = torch.autograd.grad(ops.experts(*args).sum(), (args[0], args[3]))
    expected = torch.autograd.grad(by_a_loop("swiglu", *args).sum(), (args[0], args[3]))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("chosen", [0, EXPERTS - 1, EXPERTS], ids=["all to the first", "all to the last", "none"])
def test_skewed_routing_leaves_experts_without_tokens(chosen: int) -> None:
    args = layer(index=torch.full((TOKENS, 1), chosen))
    args[3].requires_grad_()
    found, expected = ops.experts(*args), by_a_loop("swiglu", *args)
    torch.testing.assert_close(found, expected)
    (grad,) = torch.autograd.grad(found.sum(), args[3])
    unused = [expert for expert in range(EXPERTS) if expert != chosen]
    assert not grad[unused].any() and (chosen == EXPERTS or grad[chosen].any())


def test_low_precision_keeps_the_dtype_of_the_tokens_under_wider_scores() -> None:
    args = [item.bfloat16() if isinstance(item, Tensor) and item.is_floating_point() else item for item in layer()]
    args[2] = args[2].float()
    args[0].requires_grad_()
    out = ops.experts(*args)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    wide = [item.detach().double() if isinstance(item, Tensor) and item.is_floating_point() else item for item in args]
    torch.testing.assert_close(out.double(), by_a_loop("swiglu", *wide), rtol=3e-2, atol=6e-2)


def backward_of(args: tuple[Any, ...], wanted: list[bool]) -> tuple[Any, tuple[Any, ...]]:
    gradient = gradient_text(args[7], args[3].shape[1], F64)
    grad = torch.randn(TOKENS, OUT, dtype=F64)
    return ops.experts_backward.default, (grad, *args, gradient, wanted)


@pytest.mark.parametrize("biased", [True, False], ids=["biased", "unbiased"])
def test_experts_may_be_cut_as_their_rules_say(biased: bool) -> None:
    args = layer(biased=biased)
    wanted = [True, True, True, biased, True, biased]
    forms = assert_every_rule_holds((ops.experts.default, args))
    forms &= assert_every_rule_holds(backward_of(args, wanted))
    assert {OWN_EXPERTS, ALL_TO_ALL, INSIDE} <= forms


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_where_tokens_travel_other_axes_may_leave_ranks_without_choices_or_outputs(direction: str) -> None:
    args = layer(biased=False)
    case = ops.experts.default, args
    if direction == "backward":
        case = backward_of(args, [True, True, True, False, True, False])
    gm = trace_op(*case, {})
    call, tensors = call_in(gm), [item for item in case[1] if isinstance(item, Tensor)]
    whole = case[0](*case[1])
    found = [strategy for strategy in strategies_of(call, rules_of(call), (4, 2)) if strategy.axes_with(ALL_TO_ALL)]
    assert len({strategy.rules[0] for strategy in found}) >= 6
    fake_calls = fake_calls_of(gm)
    for strategy in found:
        actual = run_sharded(gm, strategy, (4, 2), tensors, fake_calls)
        expected = whole if isinstance(whole, tuple) else (whole,)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_gradients_that_nobody_wants_are_empty_under_every_rule() -> None:
    args = layer()
    assert_every_rule_holds(backward_of(args, [True, True, False, False, False, False]), meshes=((2,),))


def groups() -> tuple[Tensor, Tensor, Tensor]:
    """Rows, matrices, ends: an empty group, and a row behind the last."""
    torch.manual_seed(0)
    ends = torch.tensor([2, 2, 5, 6, 10, 11], dtype=torch.int32)
    return torch.randn(12, HIDDEN, dtype=F64), torch.randn(EXPERTS, HIDDEN, INNER, dtype=F64), ends


def test_products_in_groups_and_their_gradients_are_those_of_the_rows() -> None:
    rows, matrices, ends = groups()
    rows.requires_grad_()
    matrices.requires_grad_()
    group = torch.searchsorted(ends, torch.arange(12), right=True)
    padded = torch.cat((matrices, torch.zeros_like(matrices[:1])))
    expected = torch.einsum("rk,rkn->rn", rows, padded[group])
    found = ops.grouped_mm(rows, matrices, ends, 0)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    grads = torch.autograd.grad(found, (rows, matrices), grad, create_graph=True)
    wanted = torch.autograd.grad(expected, (rows, matrices), grad, create_graph=True)
    torch.testing.assert_close(grads, wanted)
    second = torch.autograd.grad(grads[1].square().sum(), rows), torch.autograd.grad(wanted[1].square().sum(), rows)
    torch.testing.assert_close(*second)


def test_products_in_groups_may_be_cut_as_their_rules_say() -> None:
    rows, matrices, ends = groups()
    assert_every_rule_holds((ops.grouped_mm.default, (rows, matrices, ends, 0)))
    right = torch.randn(12, INNER, dtype=F64)
    assert_every_rule_holds((ops.grouped_outer.default, (rows, right, ends, 0, EXPERTS)))


@pytest.mark.parametrize("function", [lambda x: x.softmax(-1), lambda x: x.sum(), lambda x: x.t(), lambda x: x @ x.t()])
def test_what_is_not_elementwise_has_no_text(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NotPointwiseError):
        text_of(function, 1, F64)


def test_a_text_is_read_back_and_nothing_else_is_run() -> None:
    text = text_of(clamped, 2, F64)
    x = torch.randn(3, 4, dtype=F64), torch.randn(3, 4, dtype=F64)
    torch.testing.assert_close(parse(text)(*x)[0], clamped(*x))
    for wrong in (
        "y0 = aten.sum.default(x0); y0",
        "y0 = os.system('x'); y0",
        "import os; x0",
        "y0 = aten.add_.Tensor(x0, x0); y0",
    ):
        with pytest.raises(NotPointwiseError):
            parse(wrong)
