"""Scaled dot-product attention as one op, whatever kernel the device has for it, and its backward.

Heads may be grouped: k and v have Hk heads, q has a multiple of that, and head h of q reads head h // (Hq / Hk).
`mask` broadcasts to the scores [B, Hq, Lq, Lk]: bool (True keeps) or added. `offset` and `full_shape` say where these
scores lie in those of the whole op: causality compares offset query and key positions, and dropout draws at them.
Outputs lie in memory as [B, L, H, D].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ops.attention_kernels import Kernel, choose_kernel, packed
from autopar.ops.define import differentiate, fake_of, op
from autopar.ops.random_bits import random_mask

FLAT = torch.contiguous_format
CHUNK_BYTES = 1 << 26  # of one score matrix; larger ones are computed batch entry by batch entry

HOW = (
    "Tensor? mask, Tensor? seed, float dropout_p, bool is_causal, float? scale, int key, SymInt[] offset, "
    "SymInt[] full_shape"
)


@dataclass(frozen=True, slots=True)
class Scores:
    """Everything besides q, k, v and mask that decides the scores."""

    seed: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float
    key: int
    offset: tuple[int, ...]
    full_shape: tuple[int, ...]

    @property
    def drops(self) -> bool:
        return self.dropout_p > 0

    @property
    def query_start(self) -> int:
        """Position of the first query minus that of the first key."""
        return self.offset[2] - self.offset[3]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def heads_inside(value: Tensor) -> Tensor:
    """[B, H, L, D] laid out in memory as [B, L, H, D]."""
    return value.transpose(1, 2).contiguous().transpose(1, 2)


def grouped_heads(value: Tensor, key_heads: int) -> Tensor:
    """[B, Hq, ...] as [B, Hk, G, ...]."""
    return value.view(value.shape[0], key_heads, value.shape[1] // key_heads, *value.shape[2:])


def score_matrix(q: Tensor, k: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Scaled, masked scores [B, Hk, G, Lq, Lk] in the accumulation dtype; forbidden ones are -inf."""
    kind = accumulation_dtype(q.dtype)
    grouped = grouped_heads(q.to(kind), k.shape[1]).mul(scores.scale)
    value: Tensor = (grouped.flatten(2, 3) @ k.to(kind).transpose(-1, -2)).view(*grouped.shape[:-1], k.shape[2])
    if scores.is_causal:
        rows = torch.arange(q.shape[2], device=q.device) + scores.query_start
        allowed = rows[:, None] >= torch.arange(k.shape[2], device=q.device)
        value.masked_fill_(~allowed, -math.inf)
    if mask is None:
        return value
    grouped_mask = grouped_heads(mask.expand(-1, q.shape[1], -1, -1), k.shape[1])
    if mask.dtype == torch.bool:
        return value.masked_fill_(~grouped_mask, -math.inf)
    return value.add_(grouped_mask)


def kept(scores: Scores, shape: Sequence[int], first: int) -> Tensor:
    """Dropout's factor per score, for the batch entries from `first` on; `shape` is [B, Hk, G, Lq, Lk]."""
    assert scores.seed is not None
    keep = 1 - scores.dropout_p
    extent = [shape[0], shape[1] * shape[2], shape[3], shape[4]]
    offset = [scores.offset[0] + first, *scores.offset[1:]]
    mask = random_mask(scores.seed, extent, offset, list(scores.full_shape), keep, scores.key)
    factor: Tensor = mask.view(tuple(shape)) * (1 / keep if keep > 0 else 0.0)
    return factor


def batch_chunks(q: Tensor, k: Tensor) -> list[slice]:
    """Slices of the batch whose scores stay within CHUNK_BYTES where one entry does."""
    entry_bytes = q.shape[1] * q.shape[2] * k.shape[2] * accumulation_dtype(q.dtype).itemsize
    step = max(1, CHUNK_BYTES // max(1, entry_bytes))
    return [slice(start, min(start + step, q.shape[0])) for start in range(0, q.shape[0], step)]


def of_batch(mask: Tensor | None, part: slice) -> Tensor | None:
    return mask if mask is None or mask.shape[0] == 1 else mask[part]


def explicit_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> tuple[Tensor, Tensor]:
    """Attention by matrix products, for what no kernel takes."""
    out, lse = empty_outputs(q, v)
    for part in batch_chunks(q, k):
        value = score_matrix(q[part], k[part], of_batch(mask, part), scores)
        total = value.logsumexp(-1, keepdim=True)
        weights = value.sub_(finite(total)).exp_()
        if scores.drops:
            weights = weights.mul_(kept(scores, weights.shape, part.start))
        product = weights.flatten(2, 3) @ v[part].to(weights.dtype)
        out[part] = product.view(*weights.shape[:-1], v.shape[3]).flatten(1, 2)
        lse[part] = finite(total).flatten(1, 2).squeeze(-1)
    return out, lse


def finite(total: Tensor) -> Tensor:
    """The log-sum-exp, 0 for a row without any key: its weights are then exp(-inf) = 0."""
    return total.masked_fill(total == -math.inf, 0.0)


def explicit_backward(saved: tuple[Tensor, ...], mask: Tensor | None, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for q, k, v: with weights P, dropout factor M: dS = P * (M * (dO V^T) - rowsum(dO * O))."""
    grad_out, q, k, v, out, lse = saved
    grads = empty_like_inputs(q, k, v)
    kind, heads = accumulation_dtype(q.dtype), k.shape[1]
    for part in batch_chunks(q, k):
        weights = score_matrix(q[part], k[part], of_batch(mask, part), scores)
        weights.sub_(grouped_heads(lse[part], heads).unsqueeze(-1)).exp_()
        grad = grad_out[part].to(kind)
        delta = grouped_heads((grad * out[part]).sum(-1), heads).unsqueeze(-1)
        grad = grouped_heads(grad, heads).flatten(2, 3)
        grad_scores = (grad @ v[part].to(kind).transpose(-1, -2)).view(weights.shape)
        dropped = weights
        if scores.drops:
            factor = kept(scores, weights.shape, part.start)
            dropped = weights * factor
            grad_scores.mul_(factor)
        grads[2][part] = dropped.flatten(2, 3).transpose(-1, -2) @ grad
        grad_scores = grad_scores.sub_(delta).mul_(weights).mul_(scores.scale).flatten(2, 3)
        grads[0][part] = (grad_scores @ k[part].to(kind)).view(*weights.shape[:-1], k.shape[3]).flatten(1, 2)
        grads[1][part] = grad_scores.transpose(-1, -2) @ grouped_heads(q[part].to(kind), heads).flatten(2, 3)
    return grads


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, length = q.shape[:3]
    out = q.new_empty((batch, length, heads, v.shape[3])).transpose(1, 2)
    return out, q.new_empty((batch, heads, length), dtype=accumulation_dtype(q.dtype))


def empty_like_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = (
        torch.empty_like(x.transpose(1, 2), memory_format=FLAT).transpose(1, 2) for x in (q, k, v)
    )
    return grad_q, grad_k, grad_v


@op(f"attention(Tensor q, Tensor k, Tensor v, {HOW}) -> (Tensor, Tensor)")
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *how: Any) -> tuple[Tensor, Tensor]:
    """(softmax(scale q k^T + mask) v, log-sum-exp of the scores); rows without any key give 0 in both."""
    scores = read_scores(q, *how)
    kernel = choose_kernel(q, k, v, mask, scores)
    if kernel is None:
        return explicit_forward(q, k, v, mask, scores)
    out, lse = kernel.forward(*map(packed, (q, k, v)))
    return heads_inside(out), lse.contiguous()


@op(
    "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{HOW}) -> (Tensor, Tensor, Tensor)"
)
def attention_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with respect to q, k and v."""
    grad_out, q, k, v, out, lse, mask, *how = args
    scores = read_scores(q, *how)
    kernel = choose_kernel(q, k, v, mask, scores)
    if kernel is None:
        return explicit_backward((grad_out, q, k, v, out, lse), mask, scores)
    given, query, key, value, result = map(packed, (grad_out, q, k, v, out))
    grad_q, grad_k, grad_v = map(heads_inside, kernel.backward(given, query, key, value, result, lse))
    return grad_q, grad_k, grad_v


def read_scores(q: Tensor, *how: Any) -> Scores:
    """From the op's arguments after `mask`."""
    seed, dropout_p, is_causal, scale, key, offset, full_shape = how
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return Scores(seed, dropout_p, is_causal, factor, key, tuple(offset), tuple(full_shape))


@fake_of("attention")
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return empty_outputs(q, v)


@fake_of("attention_backward")
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like_inputs(q, k, v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, seed, *ctx.how = inputs
    ctx.save_for_backward(q, k, v, *output, mask, seed)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, _: object) -> tuple[Any, ...]:
    if grad_out is None:
        return (None,) * 11
    q, k, v, out, lse, mask, seed = ctx.saved_tensors
    grads = torch.ops.autopar.attention_backward(grad_out, q, k, v, out, lse, mask, seed, *ctx.how)
    return (*grads, *(None,) * 8)


differentiate("attention", _backward, _save)

__all__ = ["Kernel", "attention", "attention_backward"]
