"""Attention as an op equals torch's, forward and backward, in every form that it takes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.ops.attention import explicit_backward, explicit_forward, read_scores

ops = torch.ops.autopar
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
LENGTHS = [(5, 5), (5, 9), (9, 5), (300, 520)]
MASKS = ["none", "keys", "added", "pairs", "empty row"]


def inputs(
    dtype: torch.dtype, heads: tuple[int, int] = (4, 4), lengths: tuple[int, int] = (5, 9), batch: int = 2
) -> tuple[Tensor, ...]:
    query = torch.randn(batch, heads[0], lengths[0], 16, dtype=dtype, requires_grad=True)
    keys = [torch.randn(batch, heads[1], lengths[1], 16, dtype=dtype, requires_grad=True) for _ in range(2)]
    return (query, *keys)


def how(q: Tensor, k: Tensor, *, causal: bool = False, dropout_p: float = 0.0) -> tuple[Any, ...]:
    """The op's arguments after the mask."""
    seed = torch.tensor(7) if dropout_p else None
    return seed, dropout_p, causal, None, 3, [0] * 4, [q.shape[0], q.shape[1], q.shape[2], k.shape[2]]


def mask_named(name: str, lengths: tuple[int, int], heads: int, dtype: torch.dtype) -> Tensor | None:
    rows, columns = lengths
    if name == "none":
        return None
    if name == "keys":
        return torch.rand(2, 1, 1, columns) > 0.3
    if name == "added":
        return torch.randn(1, heads, rows, columns, dtype=dtype)
    mask = torch.rand(1, 1, rows, columns) > 0.3
    if name == "empty row":
        mask[:, :, 1] = False
    return mask


def expected(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """F.scaled_dot_product_attention, with the causal mask written out where it cannot be asked for."""
    if mask is None or not causal:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
    lower = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    both = mask & lower if mask.dtype == torch.bool else mask.masked_fill(~lower, -math.inf)
    return F.scaled_dot_product_attention(q, k, v, both, enable_gqa=True)


def assert_same(actual: tuple[Tensor, ...], reference: tuple[Tensor, ...]) -> None:
    for value, other in zip(actual, reference, strict=True):
        tolerance = TOLERANCE[value.dtype]
        torch.testing.assert_close(
            value, other, rtol=tolerance, atol=tolerance * (1 + float(other.detach().abs().max()))
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_it_equals_torch_with_its_gradients(lengths: tuple[int, int], name: str, *, causal: bool) -> None:
    grouped = ((4, 2),) if max(lengths) > 100 else ((4, 4), (4, 2), (4, 1))
    for dtype, heads in itertools.product(TOLERANCE, grouped):
        q, k, v = inputs(dtype, heads, lengths)
        mask = mask_named(name, lengths, heads[0], dtype)
        reference = expected(q, k, v, mask, causal=causal)
        out, _ = ops.attention(q, k, v, mask, *how(q, k, causal=causal))
        grad = torch.randn_like(reference)
        gradients = torch.autograd.grad(reference, (q, k, v), grad)
        assert_same((out, *torch.autograd.grad(out, (q, k, v), grad)), (reference, *gradients))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_the_explicit_form_equals_torch_too(name: str, *, causal: bool) -> None:
    for dtype, heads in itertools.product(TOLERANCE, ((4, 4), (4, 2))):
        q, k, v = inputs(dtype, heads)
        mask = mask_named(name, (5, 9), heads[0], dtype)
        reference = expected(q, k, v, mask, causal=causal)
        grad = torch.randn_like(reference)
        scores = read_scores(q, *how(q, k, causal=causal))
        with torch.no_grad():
            out, lse = explicit_forward(q, k, v, mask, scores)
            gradients = explicit_backward((grad, q, k, v, out, lse), mask, scores)
        assert_same((out, *gradients), (reference, *torch.autograd.grad(reference, (q, k, v), grad)))


def test_the_explicit_form_runs_batch_entries_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (item.detach() for item in inputs(torch.float64, batch=5))
    whole = ops.attention(q, k, v, None, *how(q, k, dropout_p=0.4))
    monkeypatch.setattr("autopar.ops.attention.CHUNK_BYTES", 2 * 4 * 5 * 9 * 8)
    assert_same(ops.attention(q, k, v, None, *how(q, k, dropout_p=0.4)), whole)


def test_gradients_under_dropout_are_those_of_finite_differences() -> None:
    q, k, v = inputs(torch.float64, (4, 2), (3, 5), batch=1)
    torch.autograd.gradcheck(
        lambda *qkv: ops.attention(*qkv, None, *how(q, k, causal=True, dropout_p=0.3))[0], (q, k, v)
    )


def test_gradients_with_another_value_width_are_those_of_finite_differences() -> None:
    q, k, _ = inputs(torch.float64, (2, 2), (3, 5), batch=1)
    v = torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda *qkv: ops.attention(*qkv, None, *how(q, k))[0], (q, k, v))


def test_dropout_keeps_the_mean_and_replays() -> None:
    q, k, _ = (item.detach() for item in inputs(torch.float64, lengths=(64, 128)))
    ones = torch.ones_like(k)
    first, _ = ops.attention(q, k, ones, None, *how(q, k, dropout_p=0.25))
    again, _ = ops.attention(q, k, ones, None, *how(q, k, dropout_p=0.25))
    assert torch.equal(first, again) and abs(float(first.mean()) - 1) < 0.02
    assert float(first.std()) > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_close_to_float32(dtype: torch.dtype) -> None:
    q, k, v = (item.detach().to(dtype) for item in inputs(torch.float32))
    reference = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
    for dropout_p in (0.0, 1e-9):  # a kernel, and the explicit form
        out, lse = ops.attention(q, k, v, None, *how(q, k, dropout_p=dropout_p))
        assert out.dtype == dtype and lse.dtype == torch.float32
        torch.testing.assert_close(out.float(), reference, rtol=2e-2, atol=2e-2)


def test_strides_of_the_inputs_make_no_difference() -> None:
    q, k, v, grad = (torch.randn(2, 3, 8, 5, dtype=torch.float64).transpose(2, 3) for _ in range(4))
    for mask in (None, torch.randn(1, 1, 5, 5, dtype=torch.float64).transpose(2, 3), torch.rand(2, 1, 5, 1) > 0.2):
        rest = how(q, k)
        plain = None if mask is None else mask.contiguous()
        out, lse = ops.attention(q, k, v, mask, *rest)
        assert_same((out, lse), ops.attention(q.contiguous(), k.contiguous(), v.contiguous(), plain, *rest))
        for any_grad in (grad, torch.ones(1, 1, 1, 1, dtype=torch.float64).expand(out.shape)):
            packed = [item.contiguous() for item in (any_grad, q, k, v)]
            actual = ops.attention_backward(any_grad, q, k, v, out, lse, mask, *rest)
            assert_same(actual, ops.attention_backward(*packed, out, lse, plain, *rest))


def test_no_queries_and_no_keys_are_fine() -> None:
    q, k, v = (item.detach() for item in inputs(torch.float64))
    assert ops.attention(q[:, :, :0], k, v, None, *how(q, k))[0].shape == (2, 4, 0, 16)
    out, lse = ops.attention(q, k[:, :, :0], v[:, :, :0], None, *how(q, k))
    assert not out.any() and not lse.any()


@pytest.mark.parametrize(("dropout_p", "masked"), [(0.0, False), (0.0, True), (0.3, False)])
def test_the_ops_are_registered_as_pytorch_demands(dropout_p: float, *, masked: bool) -> None:
    q, k, v = inputs(torch.float32, (4, 2))
    mask = torch.rand(2, 1, 5, 9) > 0.2 if masked else None
    rest = how(q, k, dropout_p=dropout_p)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.attention.default, (q, k, v, mask, *rest), test_utils=checks)
    out, lse = ops.attention(q, k, v, mask, *rest)
    saved = tuple(item.detach() for item in (out, q, k, v, out, lse))
    torch.library.opcheck(ops.attention_backward.default, (*saved, mask, *rest), test_utils=checks)
