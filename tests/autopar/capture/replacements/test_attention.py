"""F.scaled_dot_product_attention, replaced: every shape of its arguments, and masks that are trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.interception import Calling, Intercepted, assert_capture_matches_eager, targets_of

OP, BACKWARD = "autopar.attention.default", "autopar.attention_backward.default"

# shapes of q, k, v; the shape of a mask, if any; options
CALLS: list[tuple[tuple[tuple[int, ...], ...], tuple[int, ...] | None, dict[str, Any]]] = [
    (((5, 8), (7, 8), (7, 8)), None, {}),
    (((5, 8), (7, 8), (7, 8)), (5, 7), {}),
    (((3, 5, 8), (3, 7, 8), (3, 7, 6)), None, {"is_causal": True}),
    (((3, 5, 8), (3, 7, 8), (3, 7, 8)), (3, 5, 7), {}),
    (((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)), None, {"scale": 0.3}),
    (((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)), (5, 7), {}),
    (((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)), (3, 5, 7), {}),
    (((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)), (2, 1, 1, 7), {}),
    (((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)), (5, 1), {}),
    (((2, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)), None, {}),
    (((1, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)), None, {}),
    (((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)), None, {"enable_gqa": True}),
    (((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8)), None, {"is_causal": True}),
    (((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8)), (2, 1, 1, 5, 7), {}),
    (((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8)), (1, 1, 4, 5, 7), {}),
]


@pytest.mark.parametrize(("shapes", "mask_shape", "options"), CALLS)
def test_every_shape_of_arguments_equals_torch(
    shapes: tuple[tuple[int, ...], ...], mask_shape: tuple[int, ...] | None, options: dict[str, Any]
) -> None:
    qkv = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    masks: list[Tensor | None] = [None]
    if mask_shape is not None:
        masks = [torch.rand(mask_shape) > 0.3, torch.randn(mask_shape, dtype=torch.float64)]
    for mask in masks:
        expected = F.scaled_dot_product_attention(*qkv, mask, **options)
        with Intercepted():
            actual = F.scaled_dot_product_attention(*qkv, mask, **options)
        grad = torch.randn_like(expected)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        gradients = torch.autograd.grad(expected, qkv, grad)
        torch.testing.assert_close(torch.autograd.grad(actual, qkv, grad), gradients, rtol=1e-12, atol=1e-12)


def self_attention(weight: Tensor, x: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(x * weight, x, x, **options)


def test_it_is_one_node_forward_and_one_backward() -> None:
    program = assert_capture_matches_eager(Calling(self_attention, 8), (torch.randn(2, 3, 5, 8),), is_causal=True)
    names = [str(node.target) for node in program.graph_module.graph.nodes]
    assert names.count(OP) == names.count(BACKWARD) == 1


def test_a_trained_mask_gets_its_gradient_from_ordinary_ops() -> None:
    def biased(weight: Tensor, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, weight)

    program = assert_capture_matches_eager(Calling(biased, 3, 5, 5), (torch.randn(2, 3, 5, 8),))
    assert OP not in targets_of(program.graph_module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_lowers_the_precision(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 5, 8)
    with Intercepted(), torch.autocast("cpu", dtype):
        assert F.scaled_dot_product_attention(x, x, x).dtype == dtype


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, options.pop("dropout", 0.0), batch_first=True, **options)


X = torch.randn(3, 5, 8)
PADDED = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
MODELS: dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {
    "attention with weights": (nn.MultiheadAttention(8, 2, batch_first=True), (X, X, X), {}),
    "attention without": (nn.MultiheadAttention(8, 2), (X, X, X), {"need_weights": False}),
    "attention in eval": (nn.MultiheadAttention(8, 2).eval(), (X, X, X), {"need_weights": False}),
    "padded keys": (nn.MultiheadAttention(8, 2, batch_first=True), (X, X, X), {"key_padding_mask": PADDED}),
    "encoder": (nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False), (X,), {}),
    "encoder in eval": (nn.TransformerEncoder(layer(dropout=0.1), 2, enable_nested_tensor=False).eval(), (X,), {}),
    "encoder with a mask": (nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False), (X, CAUSAL), {}),
    "decoder": (nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), (X, X), {"tgt_mask": CAUSAL}),
    "transformer": (nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True), (X, X), {}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_pytorchs_own_transformers_are_captured(name: str) -> None:
    model, args, kwargs = MODELS[name]
    assert_capture_matches_eager(model, args, **kwargs)
