"""Which fused attention kernel of a device takes a call, and how it is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

MAX_FLASH_HEAD_DIM = 256
HEAD_DIM_STEP = 8  # the CUDA kernels read heads in vectors of 16 bytes
EFFICIENT_LSE_STEP = 32  # the memory-efficient kernel pads the log-sum-exp to this


class HowScored(Protocol):
    """What a kernel must know of the scores (see `autopar.ops.attention.Scores`)."""

    @property
    def drops(self) -> bool: ...
    @property
    def is_causal(self) -> bool: ...
    @property
    def scale(self) -> float: ...
    @property
    def query_start(self) -> int: ...


class Kernel(Protocol):
    """A fused attention: out and log-sum-exp, and the gradients."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def choose_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: HowScored) -> Kernel | None:
    """The fastest kernel that computes exactly this, or None: then the explicit form does."""
    same_head_dim = q.shape[-1] == v.shape[-1]
    if scores.drops or not same_head_dim or not (q.numel() and k.numel()):
        return None
    if q.device.type == "cpu":
        return _cpu_kernel(q, k, mask, scores)
    if q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16, torch.float32):
        return _cuda_kernel(q, k, mask, scores)
    return None


def packed(value: Tensor) -> Tensor:
    """`value` with the elements of its last dim side by side, as the kernels read them without looking."""
    return value if value.stride(-1) == 1 else value.contiguous()


def causal_bias(q: Tensor, k: Tensor, start: int) -> Tensor:
    """True where the key's position is at most the query's; query i stands at start + i."""
    rows = torch.arange(q.shape[2], device=q.device) + start
    return (rows[:, None] >= torch.arange(k.shape[2], device=q.device))[None, None]


def added_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as what is added to the scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


@dataclass(frozen=True, slots=True)
class CpuFlash:
    """aten._scaled_dot_product_flash_attention_for_cpu."""

    mask: Tensor | None
    is_causal: bool
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse = call(q, k, v, 0.0, self.is_causal, attn_mask=self.mask, scale=self.scale)
        return out, lse

    def backward(self, grad_out: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        how = (0.0, self.is_causal)
        grad_q, grad_k, grad_v = call(grad_out, *saved, *how, attn_mask=self.mask, scale=self.scale)
        return grad_q, grad_k, grad_v


def _cpu_kernel(q: Tensor, k: Tensor, mask: Tensor | None, scores: HowScored) -> Kernel | None:
    if scores.is_causal and mask is not None:
        return None
    if scores.is_causal and scores.query_start != 0:
        mask = causal_bias(q, k, scores.query_start)
    if mask is None:
        return CpuFlash(None, scores.is_causal, scores.scale)
    bias = packed(added_bias(mask, q.dtype).expand(-1, -1, -1, k.shape[2]))
    return CpuFlash(bias.expand(q.shape[0], q.shape[1], q.shape[2], -1), False, scores.scale)


@dataclass(frozen=True, slots=True)
class CudaFlash:
    """aten._scaled_dot_product_flash_attention; causal masks are aligned at the last query and the last key."""

    is_causal: bool
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        call = torch.ops.aten._scaled_dot_product_flash_attention.default
        out, lse, *_ = call(q, *_per_query_head(q, k, v), 0.0, self.is_causal, False, scale=self.scale)
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
        keys, values = _per_query_head(q, k, v)
        rng = torch.zeros(2, dtype=torch.uint64, device=q.device)
        lengths = (None, None, q.shape[2], k.shape[2])
        how: tuple[Any, ...] = (0.0, self.is_causal, rng, rng[:0])
        grad_q, grad_k, grad_v = call(grad_out, q, keys, values, out, lse, *lengths, *how, scale=self.scale)
        return grad_q, _group_sum(grad_k, k), _group_sum(grad_v, v)


@dataclass(frozen=True, slots=True)
class CudaEfficient:
    """aten._scaled_dot_product_efficient_attention; causal masks are aligned at the first query and the first key."""

    bias: Tensor | None
    is_causal: bool
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        call = torch.ops.aten._scaled_dot_product_efficient_attention.default
        keys, values = _per_query_head(q, k, v)
        out, lse, *_ = call(q, keys, values, self.bias, True, 0.0, self.is_causal, scale=self.scale)
        return out, lse[..., : q.shape[2]]

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
        keys, values = _per_query_head(q, k, v)
        missing = -q.shape[2] % EFFICIENT_LSE_STEP
        padded = torch.nn.functional.pad(lse, (0, missing), value=float("inf"))
        zero = torch.zeros((), dtype=torch.int64, device=q.device)
        how: tuple[Any, ...] = (zero, zero, 0.0, [True, True, True, False], self.is_causal)
        grads = call(grad_out, q, keys, values, self.bias, out, padded, *how, scale=self.scale)
        return grads[0], _group_sum(grads[1], k), _group_sum(grads[2], v)


def _cuda_kernel(q: Tensor, k: Tensor, mask: Tensor | None, scores: HowScored) -> Kernel | None:
    head_dim, start = q.shape[-1], scores.query_start
    if head_dim % HEAD_DIM_STEP or head_dim > MAX_FLASH_HEAD_DIM:
        return None
    aligned = not scores.is_causal or q.shape[2] + start == k.shape[2]
    if mask is None and aligned and q.dtype != torch.float32:
        return CudaFlash(scores.is_causal, scores.scale)
    if scores.is_causal and (start != 0 or mask is not None):
        allowed = causal_bias(q, k, start)
        mask = allowed if mask is None else added_bias(mask, q.dtype) + added_bias(allowed, q.dtype)
        return CudaEfficient(_aligned_bias(mask, q, k), False, scores.scale)
    bias = None if mask is None else _aligned_bias(mask, q, k)
    return CudaEfficient(bias, scores.is_causal, scores.scale)


def _aligned_bias(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The bias per score; rows start at multiples of 16 elements, as the kernel demands."""
    bias, keys = added_bias(mask, q.dtype), k.shape[2]
    if bias.shape[-1] == 1:
        bias = bias.expand(*bias.shape[:-1], keys)
    bias = torch.nn.functional.pad(bias, (0, -keys % 16))[..., :keys]
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], keys)


def _per_query_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    repeats = q.shape[1] // k.shape[1]
    if repeats == 1:
        return k, v
    return k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)


def _group_sum(grad: Tensor, like: Tensor) -> Tensor:
    if grad.shape[1] == like.shape[1]:
        return grad
    heads = like.shape[1]
    return grad.reshape(grad.shape[0], heads, grad.shape[1] // heads, *grad.shape[2:]).sum(2)
