"""The pieces of batch norm: right sums, empty shards, PyTorch's demands on ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autopar.ops  # noqa: F401  (registers the ops)

ops = torch.ops.autopar
DIMS = (0, 2, 3)


def pieces(dtype: torch.dtype = torch.float64, shift: float = 3.0) -> tuple[Tensor, ...]:
    """(x, grad_out, mean, invstd, weight), the statistics being others than those of x."""
    x = torch.randn(6, 4, 5, 3).to(dtype) * 2 + shift
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    mean = x.to(wide).mean(DIMS) + 0.25
    return x, torch.randn_like(x), mean, torch.rand(4, dtype=wide) + 0.5, torch.randn(4, dtype=wide)


def along_channels(value: Tensor) -> Tensor:
    return value.view(1, -1, 1, 1)


def test_the_square_sum_is_about_the_given_mean() -> None:
    x, _, mean, *_ = pieces()
    torch.testing.assert_close(ops.batch_norm_square_sum(x, mean), (x - along_channels(mean)).square().sum(DIMS))


def test_the_variance_survives_a_mean_far_from_zero() -> None:
    x, *_ = pieces(torch.float32, shift=1000.0)
    mean = x.double().mean(DIMS)
    exact = (x.double() - along_channels(mean)).square().sum(DIMS)
    torch.testing.assert_close(ops.batch_norm_square_sum(x, mean.float()).double(), exact, rtol=1e-4, atol=0)


def test_the_backward_sums_are_the_sums_they_stand_for() -> None:
    x, grad, mean, *_ = pieces()
    grad_sum, product_sum = ops.batch_norm_backward_sums(grad, x, mean)
    torch.testing.assert_close(grad_sum, grad.sum(DIMS))
    torch.testing.assert_close(product_sum, (grad * (x - along_channels(mean))).sum(DIMS))


def test_an_empty_shard_adds_nothing() -> None:
    x, grad, mean, invstd, weight = pieces()
    none = x[:0]
    assert not ops.batch_norm_square_sum(none, mean).any()
    assert not any(value.any() for value in ops.batch_norm_backward_sums(grad[:0], none, mean))
    assert ops.batch_norm_apply(none, mean, invstd, weight, weight).shape == none.shape
    sums = (mean, mean)
    assert ops.batch_norm_backward_apply(grad[:0], none, mean, invstd, weight, *sums, 90).shape == none.shape


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_ops_are_registered_as_pytorch_demands(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    x, grad, mean, invstd, weight = pieces(dtype)
    x = x.contiguous(memory_format=memory_format)
    sums = ops.batch_norm_backward_sums(grad, x, mean)
    calls: dict[Any, tuple[Any, ...]] = {
        ops.batch_norm_square_sum: (x, mean),
        ops.batch_norm_apply: (x, mean, invstd, weight, None),
        ops.batch_norm_backward_sums: (grad, x, mean),
        ops.batch_norm_backward_apply: (grad, x, mean, invstd, weight, *sums, 90),
    }
    for packet, args in calls.items():
        torch.library.opcheck(packet.default, args, test_utils=("test_schema", "test_faketensor"))
