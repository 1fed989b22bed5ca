"""Dropouts, samplers and in-place fillers, in terms of `Draw`: their values do not depend on the layout."""

# Parameters are named, and pass flags, as those of the torch functions do.
# ruff: noqa: A002, FBT001

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.capture.replacements.draw import Draw
from autopar.errors import UnsupportedRandomError
from autopar.torch_compat import broadcast_shapes

SELU_NEGATIVE_LIMIT = 1.7580993408473766  # alpha * scale of Klambauer et al. 2017, as ATen's alpha_dropout has it


def sample_dtype(dtype: torch.dtype) -> torch.dtype:
    """A float dtype fine enough to compare probabilities in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dropped(draw: Draw, x: Tensor, p: float, mask_shape: Sequence[int]) -> Tensor:
    """x times a mask that is broadcast to it, scaled to keep the mean."""
    if p == 1:
        return x * torch.zeros_like(x)
    return x * draw.mask(mask_shape, 1 - p) * (1 / (1 - p))


def alpha_dropped(draw: Draw, x: Tensor, p: float, mask_shape: Sequence[int]) -> Tensor:
    """Dropout to SELU's negative limit that keeps mean and variance (Klambauer et al. 2017)."""
    if p == 1:
        return x * torch.zeros_like(x)
    limit = SELU_NEGATIVE_LIMIT
    a = 1 / math.sqrt((limit * limit * p + 1) * (1 - p))
    mask = draw.mask(mask_shape, 1 - p).to(x.dtype)
    return x * (mask * a) + ((mask - 1) * (limit * a) + limit * a * p)


def channel_mask_shape(x: Tensor, spatial_dims: int | None) -> list[int]:
    """One value per channel. Without a batch dim (rank spatial_dims + 1) they are dim 0, else dims 0 and 1."""
    kept = 1 if spatial_dims is not None and x.dim() == spatial_dims + 1 else 2
    return [size if dim < kept else 1 for dim, size in enumerate(x.shape)]


Dropped = Callable[[Draw, Tensor, float, Sequence[int]], Tensor]


def dropout_function(form: Dropped, mask_shape: Callable[[Tensor], Sequence[int]]) -> Callable[..., Any]:
    """The replacement of an `F.*dropout*(input, p, training, inplace)`."""

    def replacement(
        draw: Draw,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        **_: object,
    ) -> Any:
        if not training or p == 0 or not 0 <= p <= 1 or input.numel() == 0:
            return NotImplemented
        result = form(draw, input, p, mask_shape(input))
        return input.copy_(result) if inplace else result

    return replacement


def aten_dropout(replacement: Callable[..., Any], inplace: object = False) -> Callable[..., Any]:
    """The replacement of a `torch.*dropout*(input, p, train)` or of its in-place form."""

    def call(draw: Draw, input: Tensor, p: float, train: bool) -> Any:
        return replacement(draw, input, p, train, bool(inplace))

    return call


def size_of(args: Sequence[Any], size: Sequence[int] | None) -> list[int]:
    """The sizes of a factory call: `f(2, 3)`, `f((2, 3))` or `f(size=(2, 3))`."""
    if size is not None:
        return list(size)
    return list(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else list(args)


def finish(value: Tensor, out: Tensor | None, requires_grad: object) -> Tensor:
    """Apply a factory's `out` and `requires_grad`."""
    if out is not None:
        return out.copy_(value)
    return value.requires_grad_() if requires_grad else value


def rand(
    draw: Draw,
    *args: Any,
    size: Sequence[int] | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    **_: object,
) -> Tensor:
    value = draw.uniform(size_of(args, size), dtype or torch.get_default_dtype())
    return finish(value, out, requires_grad)


def randn(
    draw: Draw,
    *args: Any,
    size: Sequence[int] | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    **_: object,
) -> Tensor:
    value = draw.normal(size_of(args, size), dtype or torch.get_default_dtype())
    return finish(value, out, requires_grad)


def randint(
    draw: Draw,
    *args: Any,
    low: int | None = None,
    high: int | None = None,
    size: Sequence[int] | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    **_: object,
) -> Tensor:
    values = list(args)
    shape = list(size) if size is not None else list(values.pop())
    top = high if high is not None else values.pop()
    bottom = low if low is not None else (values[0] if values else 0)
    value = draw.integers(int(bottom), int(top), shape).to(dtype or torch.int64)
    return finish(value, out, None)


def randperm(draw: Draw, n: int, *, out: Tensor | None = None, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    value = draw.uniform([n], torch.float64).argsort().to(dtype or torch.int64)
    return finish(value, out, None)


def rand_like(draw: Draw, input: Tensor, *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    return draw.uniform(input.shape, dtype or input.dtype)


def randn_like(draw: Draw, input: Tensor, *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    return draw.normal(input.shape, dtype or input.dtype)


def randint_like(
    draw: Draw,
    input: Tensor,
    low: int,
    high: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    **_: object,
) -> Tensor:
    bottom, top = (0, low) if high is None else (low, high)
    return draw.integers(bottom, top, input.shape).to(dtype or input.dtype)


def normal(
    draw: Draw,
    mean: Tensor | float,
    std: Tensor | float = 1.0,
    size: Sequence[int] | None = None,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    **_: object,
) -> Tensor:
    tensors = [item for item in (mean, std) if isinstance(item, Tensor)]
    shape = size if size is not None else _common_shape(tensors)
    kind = dtype or (tensors[0].dtype if tensors else torch.get_default_dtype())
    return finish(draw.normal(shape, kind) * std + mean, out, None)


def _common_shape(tensors: Sequence[Tensor]) -> Sequence[int]:
    return broadcast_shapes(*(item.shape for item in tensors))


def bernoulli(
    draw: Draw,
    input: Tensor,
    p: float | None = None,
    *,
    out: Tensor | None = None,
    **_: object,
) -> Tensor:
    if p is not None:
        return finish(draw.mask(input.shape, p).to(input.dtype), out, None)
    value = (draw.uniform(input.shape, sample_dtype(input.dtype)) < input.detach()).to(input.dtype)
    return finish(value, out, None)


def multinomial(
    draw: Draw,
    input: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    out: Tensor | None = None,
    **_: object,
) -> Tensor:
    """Without replacement the largest of p / Exp(1) (Efraimidis and Spirakis 2006), else inversion of the CDF."""
    weights = input.detach().to(sample_dtype(input.dtype))
    if not replacement:
        keys = weights / exponential(draw, weights.shape, weights.dtype)
        return finish(keys.topk(num_samples, dim=-1).indices, out, None)
    upper = weights.cumsum(-1)
    targets = draw.uniform((*weights.shape[:-1], num_samples), weights.dtype) * upper[..., -1:]
    return finish(torch.searchsorted(upper, targets, right=True).clamp(max=weights.shape[-1] - 1), out, None)


def exponential(draw: Draw, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Exp(1) by inversion; never 0, so that its logarithm is finite."""
    kind = sample_dtype(dtype)
    return (-torch.log1p(-draw.uniform(shape, kind))).clamp_min(torch.finfo(kind).eps / 2)


def bernoulli_(draw: Draw, self: Tensor, p: Tensor | float = 0.5, **_: object) -> Tensor:
    if isinstance(p, Tensor):
        return self.copy_(draw.uniform(self.shape, sample_dtype(p.dtype)) < p)
    return self.copy_(draw.mask(self.shape, p))


def uniform_(draw: Draw, self: Tensor, *args: float, **kwargs: Any) -> Tensor:
    low = args[0] if args else kwargs.get("from", 0.0)
    high = args[1] if len(args) > 1 else kwargs.get("to", 1.0)
    return self.copy_(draw.uniform(self.shape, self.dtype) * (high - low) + low)


def normal_(draw: Draw, self: Tensor, mean: float = 0.0, std: float = 1.0, **_: object) -> Tensor:
    return self.copy_(draw.normal(self.shape, self.dtype) * std + mean)


def log_normal_(draw: Draw, self: Tensor, mean: float = 1.0, std: float = 2.0, **_: object) -> Tensor:
    return self.copy_((draw.normal(self.shape, self.dtype) * std + mean).exp())


def exponential_(draw: Draw, self: Tensor, lambd: float = 1.0, **_: object) -> Tensor:
    return self.copy_(exponential(draw, self.shape, self.dtype) / lambd)


def geometric_(draw: Draw, self: Tensor, p: float, **_: object) -> Tensor:
    return self.copy_((exponential(draw, self.shape, torch.float64) / -math.log1p(-p)).ceil().clamp_min(1))


def cauchy_(draw: Draw, self: Tensor, median: float = 0.0, sigma: float = 1.0, **_: object) -> Tensor:
    angle = (draw.uniform(self.shape, sample_dtype(self.dtype)) - 0.5) * math.pi
    return self.copy_(angle.tan() * sigma + median)


def random_(draw: Draw, self: Tensor, *args: int, **kwargs: Any) -> Tensor:
    """Integers of [from, to), by default of all that the dtype holds exactly."""
    if len(args) == 1 and "to" not in kwargs:
        return self.copy_(draw.integers(0, args[0], self.shape))
    low = args[0] if args else kwargs.get("from", 0)
    high = args[1] if len(args) > 1 else kwargs.get("to")
    if high is None:
        floating = self.dtype.is_floating_point
        high = 2 ** (1 - round(math.log2(torch.finfo(self.dtype).eps))) if floating else _integers_below(self.dtype)
    return self.copy_(draw.integers(low, high, self.shape))


def _integers_below(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.bool else min(torch.iinfo(dtype).max, 2**53)


def rrelu(
    draw: Draw,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
    **_: object,
) -> Any:
    if not training:
        return NotImplemented
    slope = draw.uniform(input.shape, input.dtype) * (upper - lower) + lower
    result = torch.where(input <= 0, input * slope, input)
    return input.copy_(result) if inplace else result


def fractional_pool(function: Callable[..., Any], spatial_dims: int) -> Callable[..., Any]:
    """The replacement of a fractional max pool: it draws where its windows start."""

    def replacement(draw: Draw, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("_random_samples") is not None:
            return NotImplemented
        batch = input.shape[0] if input.dim() == spatial_dims + 2 else 1
        samples = draw.uniform((batch, input.shape[-spatial_dims - 1], spatial_dims), input.dtype)
        return function(input, *args, **{**kwargs, "_random_samples": samples})

    return replacement


def refused(name: str) -> Callable[..., Any]:
    """The replacement of a sampler that has no form of fixed cost."""

    def replacement(*_: object, **__: object) -> Any:
        raise UnsupportedRandomError(
            f"{name} has no form that gives the same values under every layout",
            fix="draw the samples outside the model and pass them in, or use rand, randn, randint or bernoulli",
        )

    return replacement


def same_shape(x: Tensor) -> Sequence[int]:
    return x.shape


def _channels(spatial_dims: int | None) -> Callable[[Tensor], Sequence[int]]:
    return lambda x: channel_mask_shape(x, spatial_dims)


_dropout = dropout_function(dropped, same_shape)
_alpha = dropout_function(alpha_dropped, same_shape)
_feature = dropout_function(dropped, _channels(None))
_feature_alpha = dropout_function(alpha_dropped, _channels(None))

RANDOM_REPLACEMENTS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.dropout: _dropout,
    F.alpha_dropout: _alpha,
    F.dropout1d: dropout_function(dropped, _channels(1)),
    F.dropout2d: _feature,
    F.dropout3d: dropout_function(dropped, _channels(3)),
    F.feature_alpha_dropout: _feature_alpha,
    torch.dropout: aten_dropout(_dropout),
    torch.dropout_: aten_dropout(_dropout, "in place"),
    torch.alpha_dropout: aten_dropout(_alpha),
    torch.alpha_dropout_: aten_dropout(_alpha, "in place"),
    torch.feature_dropout: aten_dropout(_feature),
    torch.feature_dropout_: aten_dropout(_feature, "in place"),
    torch.feature_alpha_dropout: aten_dropout(_feature_alpha),
    torch.feature_alpha_dropout_: aten_dropout(_feature_alpha, "in place"),
    torch.rand: rand,
    torch.randn: randn,
    torch.randint: randint,
    torch.randperm: randperm,
    torch.rand_like: rand_like,
    torch.randn_like: randn_like,
    torch.randint_like: randint_like,
    torch.normal: normal,
    torch.bernoulli: bernoulli,
    torch.Tensor.bernoulli: bernoulli,
    torch.multinomial: multinomial,
    torch.Tensor.multinomial: multinomial,
    torch.Tensor.bernoulli_: bernoulli_,
    torch.Tensor.uniform_: uniform_,
    torch.Tensor.normal_: normal_,
    torch.Tensor.log_normal_: log_normal_,
    torch.Tensor.exponential_: exponential_,
    torch.Tensor.geometric_: geometric_,
    torch.Tensor.cauchy_: cauchy_,
    torch.Tensor.random_: random_,
    F.rrelu: rrelu,
    torch.rrelu: rrelu,
    F.fractional_max_pool2d: fractional_pool(F.fractional_max_pool2d, 2),
    F.fractional_max_pool2d_with_indices: fractional_pool(F.fractional_max_pool2d_with_indices, 2),
    F.fractional_max_pool3d: fractional_pool(F.fractional_max_pool3d, 3),
    F.fractional_max_pool3d_with_indices: fractional_pool(F.fractional_max_pool3d_with_indices, 3),
    torch.poisson: refused("torch.poisson"),
    torch.binomial: refused("torch.binomial"),
    torch._standard_gamma: refused("the gamma distribution"),
    torch._sample_dirichlet: refused("the Dirichlet distribution"),
}
