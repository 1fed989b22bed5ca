"""The pieces of batch norm in training, cut where shards of the batch or of space must add up.

Sums over everything but the channels (dim 1) are ops of their own, so that under a sharded batch or space they are
partial sums and the statistics are those of the global batch. The variance is centered on the global mean (Chan,
Golub and LeVeque 1979), in float32 or better.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.ops.define import fake_of, op


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def per_channel(value: Tensor, x: Tensor) -> Tensor:
    """[C] in the shape that broadcasts to x."""
    return value.view(-1, *(1,) * (x.dim() - 2))


def widened(x: Tensor) -> Tensor:
    """x in a precision that the CPU kernels accumulate in; CUDA kernels do that by themselves."""
    return x.to(statistics_dtype(x.dtype)) if x.device.type == "cpu" else x


@op("batch_norm_square_sum(Tensor x, Tensor mean) -> Tensor")
def batch_norm_square_sum(x: Tensor, mean: Tensor) -> Tensor:
    """Per channel the sum of (x - mean)^2: about the mean of this x, moved to `mean`."""
    if x.numel() == 0:
        return torch.zeros_like(mean)
    count = x.numel() // x.shape[1]
    own_mean, own_variance = torch.ops.aten.batch_norm_update_stats.default(widened(x), None, None, 0.0)
    square_sum: Tensor = (own_variance + (own_mean - mean).square()).mul_(count).to(mean.dtype)
    return square_sum


@op("batch_norm_apply(Tensor x, Tensor mean, Tensor invstd, Tensor? weight, Tensor? bias) -> Tensor")
def batch_norm_apply(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """(x - mean) * invstd * weight + bias, in x's dtype and memory format."""
    weight, bias = (None if item is None else item.to(mean.dtype) for item in (weight, bias))
    if x.device.type == "cuda" and x.numel():
        fused: Tensor = torch.ops.aten.batch_norm_elemt.default(x, weight, bias, mean, invstd, 0.0)
        return fused
    scale = invstd if weight is None else invstd * weight
    out = torch.empty_like(x, dtype=mean.dtype)
    torch.sub(x, per_channel(mean, x), out=out).mul_(per_channel(scale, x))
    if bias is not None:
        out.add_(per_channel(bias, x))
    return out.to(x.dtype)


@op("batch_norm_backward_sums(Tensor grad_out, Tensor x, Tensor mean) -> (Tensor, Tensor)")
def batch_norm_backward_sums(grad_out: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Per channel the sums of grad_out and of grad_out * (x - mean)."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    if x.device.type == "cuda":
        call = torch.ops.aten.batch_norm_backward_reduce.default
        grad_sum, product_sum, *_ = call(grad_out, x, mean, mean, None, True, False, False)
        return grad_sum, product_sum
    call = torch.ops.aten.native_batch_norm_backward.default  # in inference form, for a variance of 1
    variance = torch.ones_like(mean)
    values = (widened(grad_out), widened(x))
    _, product_sum, grad_sum = call(*values, None, mean, variance, None, None, False, 0.0, [False, True, True])
    return grad_sum, product_sum


@op(
    "batch_norm_backward_apply(Tensor grad_out, Tensor x, Tensor mean, Tensor invstd, Tensor? weight, Tensor grad_sum, "
    "Tensor product_sum, int count) -> Tensor"
)
def batch_norm_backward_apply(
    grad_out: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    grad_sum: Tensor,
    product_sum: Tensor,
    count: int,
) -> Tensor:
    """The gradient of x: weight * invstd * (dy - E[dy] - (x - mean) * invstd^2 * E[dy * (x - mean)]).

    `count`: elements per channel of the whole batch, over which the expectations run.
    """
    weight = None if weight is None else weight.to(mean.dtype)
    if x.device.type == "cuda" and x.numel():
        call = torch.ops.aten.batch_norm_backward_elemt.default
        counts = torch.full((1,), count, dtype=torch.int32, device=x.device)
        fused: Tensor = call(grad_out, x, mean, invstd, weight, grad_sum, product_sum, counts)
        return fused
    slope = invstd.square().mul_(product_sum).div_(-count)
    scale = invstd if weight is None else invstd * weight
    out = torch.empty_like(x, dtype=mean.dtype)
    torch.sub(x, per_channel(mean, x), out=out).mul_(per_channel(slope, x))
    out.add_(grad_out).sub_(per_channel(grad_sum / count, x)).mul_(per_channel(scale, x))
    return out.to(x.dtype)


@fake_of("batch_norm_square_sum")
def _(x: Tensor, mean: Tensor) -> Tensor:
    return torch.empty_like(mean)


@fake_of("batch_norm_apply")
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


@fake_of("batch_norm_backward_sums")
def _(grad_out: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(mean), torch.empty_like(mean)


@fake_of("batch_norm_backward_apply")
def _(grad_out: Tensor, x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


def channel_count(x: Tensor) -> int:
    """Elements per channel."""
    return math.prod(x.shape[:1] + x.shape[2:])
