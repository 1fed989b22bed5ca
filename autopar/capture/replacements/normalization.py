"""Batch norm and instance norm over their own input's statistics, in pieces that any sharding keeps global.

Weight norm in ordinary ops: its kernel takes strided shards for contiguous ones.
"""

# Parameters are named, and pass flags, as those of the torch functions do.
# ruff: noqa: A002, FBT001

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.capture.replacements.draw import Draw
from autopar.ops.batch_norm import channel_count, statistics_dtype
from autopar.torch_compat import apply_function

ops = torch.ops.autopar


class _Normalize(torch.autograd.Function):
    """(y, mean, biased variance) of a batch; only y is differentiable."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = channel_count(x)
        dims = [0, *range(2, x.dim())]
        mean = torch.sum(x, dims, dtype=statistics_dtype(x.dtype)) * (1 / count)
        variance = ops.batch_norm_square_sum(x, mean) * (1 / count)
        invstd = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, invstd)
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return ops.batch_norm_apply(x, mean, invstd, weight, bias), mean, variance

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd = ctx.saved_tensors
        grad_out = grads[0]
        if grad_out is None:
            return None, None, None, None
        grad_sum, product_sum = ops.batch_norm_backward_sums(grad_out, x, mean)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            how = (grad_sum, product_sum, channel_count(x))
            grad_x = ops.batch_norm_backward_apply(grad_out, x, mean, invstd, weight, *how)
        if ctx.needs_input_grad[1]:
            grad_weight = (product_sum * invstd).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad_sum.to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None


def normalized(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x normalized per channel, its mean and its biased variance."""
    value, mean, variance = apply_function(_Normalize, x, weight, bias, eps)
    return value, mean, variance


def move_average(running: Tensor | None, value: Tensor, momentum: float | Tensor) -> None:
    """running = (1 - momentum) * running + momentum * value."""
    if running is not None:
        with torch.no_grad():
            running.copy_(running * (1 - momentum) + value * momentum)


def batch_norm(
    draw: Draw,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
) -> Any:
    if not training:
        return NotImplemented
    count = channel_count(input)
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
    value, mean, variance = normalized(input, weight, bias, eps)
    move_average(running_mean, mean, momentum)
    move_average(running_var, variance * (count / max(1, count - 1)), momentum)
    return value


def aten_batch_norm(
    draw: Draw,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    return batch_norm(draw, input, running_mean, running_var, weight, bias, training, momentum, eps)


def instance_norm(
    draw: Draw,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Batch norm of a batch of one whose channels are the (sample, channel) pairs."""
    if not use_input_stats:
        return NotImplemented
    samples, channels = input.shape[:2]
    flat = input.reshape(1, samples * channels, *input.shape[2:])
    count = channel_count(flat)
    if count == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {input.shape}")
    value, mean, variance = normalized(flat, None, None, eps)
    unbiased = variance * (count / max(1, count - 1))
    move_average(running_mean, mean.view(samples, channels).mean(0), momentum)
    move_average(running_var, unbiased.view(samples, channels).mean(0), momentum)
    value = value.view(input.shape)
    shape = (channels, *(1,) * (input.dim() - 2))
    value = value if weight is None else value * weight.view(shape)
    return value if bias is None else value + bias.view(shape)


def aten_instance_norm(
    draw: Draw,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    return instance_norm(draw, input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _synchronized_forward(self: _BatchNorm, input: Tensor) -> Tensor:
    """SyncBatchNorm as the batch norm it is on one device; with momentum None, averages over all batches so far."""
    if self.momentum is not None or not (self.training and self.track_running_stats):
        return _BatchNorm.forward(self, input)
    assert isinstance(self.num_batches_tracked, Tensor)
    self.num_batches_tracked.add_(1)
    momentum: Any = 1.0 / self.num_batches_tracked  # a tensor, which `batch_norm` above takes
    stats = (self.running_mean, self.running_var)
    return F.batch_norm(input, *stats, self.weight, self.bias, True, momentum, self.eps)


@contextmanager
def traceable_batch_norms(model: nn.Module) -> Iterator[None]:
    """Give batch norms that read a tensor's value, or ask for a process group, a forward that does neither.

    These are SyncBatchNorm, and any with momentum None. The modules are as before on leaving.
    """
    changed = [
        module
        for module in model.modules()
        if isinstance(module, nn.SyncBatchNorm) or (isinstance(module, _BatchNorm) and module.momentum is None)
    ]
    for module in changed:
        module.__dict__["forward"] = MethodType(_synchronized_forward, module)
    try:
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


def weight_norm_with_norms(draw: Draw, v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """(g v / |v|, |v|), a norm for each index of `dim`; for -1, one in all."""
    reduced = [other for other in range(v.dim()) if other != dim]
    norms = torch.linalg.vector_norm(v) if dim == -1 else torch.linalg.vector_norm(v, dim=reduced, keepdim=True)
    return v * (g / norms), norms


def weight_norm(draw: Draw, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return weight_norm_with_norms(draw, v, g, dim)[0]


NORMALIZATION_REPLACEMENTS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.batch_norm: batch_norm,
    torch.batch_norm: aten_batch_norm,
    F.instance_norm: instance_norm,
    torch.instance_norm: aten_instance_norm,
    torch._weight_norm: weight_norm,
    torch._weight_norm_interface: weight_norm_with_norms,
}
