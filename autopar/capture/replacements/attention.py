"""Scaled dot-product attention as one op; as matrix products where its mask is trained."""

# Parameters are named, and pass flags, as those of the torch function do.
# ruff: noqa: FBT001

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.capture.replacements.draw import Draw
from autopar.capture.replacements.randomness import dropped
from autopar.torch_compat import broadcast_shapes


def scaled_dot_product_attention(
    draw: Draw,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """F.scaled_dot_product_attention of inputs of any rank, through `autopar::attention`."""
    if query.is_nested or (attn_mask is not None and is_causal):
        return NotImplemented
    batch = broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    q, k, v = (_four_dims(item, batch) for item in autocast((query, key, value)))
    mask = None if attn_mask is None else _mask_of_four_dims(attn_mask, query.dim(), q.shape[0], batch)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(q.dtype)
    if not enable_gqa and not q.shape[1] == k.shape[1] == v.shape[1]:
        heads = max(q.shape[1], k.shape[1], v.shape[1])
        q, k, v = (item.expand(-1, heads, -1, -1) for item in (q, k, v))
    if enable_gqa and k.shape[1] != v.shape[1]:
        k, v = (item.repeat_interleave(q.shape[1] // item.shape[1], 1) for item in (k, v))
    if mask is not None and mask.requires_grad:
        out = explicit_attention(draw, (q, k, v), mask, dropout_p, scale)
    else:
        shape = [q.shape[0], q.shape[1], q.shape[2], k.shape[2]]
        seed, number = (draw.seed, draw.draw_key()) if dropout_p > 0 else (None, 0)
        how = (seed, float(dropout_p), is_causal, scale, number, [0] * 4, shape)
        out = torch.ops.autopar.attention(q, k, v, mask, *how)[0]
    return _of_rank(out, query.dim(), batch)


def explicit_attention(
    draw: Draw, qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor, dropout_p: float, scale: float | None
) -> Tensor:
    """Attention in ordinary ops, for a mask that needs a gradient."""
    q, k, v = qkv
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = torch.matmul(q * factor, k.transpose(-1, -2)) + mask
    weights = torch.softmax(scores, -1)
    if dropout_p > 0:
        weights = dropped(draw, weights, dropout_p, weights.shape)
    return torch.matmul(weights, v)


def autocast(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """As autocast's list of lower-precision functions demands."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    kind = torch.get_autocast_dtype(device)
    return tuple(item if item.dtype == torch.float64 else item.to(kind) for item in tensors)


def _four_dims(value: Tensor, batch: tuple[int, ...]) -> Tensor:
    """[L, E] and [N, L, E] get a head dim of size 1; leading dims are broadcast to `batch` and merged."""
    if value.dim() == 2:
        return value[None, None]
    if value.dim() == 3:
        return value[:, None]
    if tuple(value.shape[:-3]) != tuple(batch):
        value = value.expand(*batch, *value.shape[-3:])
    return value if value.dim() == 4 else value.flatten(0, -4)


def _mask_of_four_dims(mask: Tensor, query_dims: int, batch_size: int, batch: tuple[int, ...]) -> Tensor:
    """The mask with dims [B or 1, H or 1, Lq or 1, Lk or 1]."""
    if query_dims == 3 and mask.dim() == 3:
        return mask[:, None]
    if mask.dim() <= 4:
        return mask[(None,) * (4 - mask.dim())]
    lead = mask.shape[:-3]
    if math.prod(lead) == 1:
        return mask.flatten(0, -4)
    return mask.expand(*batch, *mask.shape[-3:]).reshape(batch_size, *mask.shape[-3:])


def _of_rank(out: Tensor, dims: int, batch: tuple[int, ...]) -> Tensor:
    if dims == 2:
        return out[0, 0]
    if dims == 3:
        return out.squeeze(1)
    return out if dims == 4 else torch.unflatten(out, 0, batch)


ATTENTION_REPLACEMENTS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: scaled_dot_product_attention,
}
