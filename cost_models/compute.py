"""Seconds of one op on one device: roofline, an efficiency curve by dtype and size, launch overhead.

Every function takes a `Device` and plain sizes (numbers or numpy arrays, in bulk) and gives seconds. An arithmetic
that the device has no rate for is an `UnpricedError`. A multiply-add is 2 flops.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import sympy

from autopar.cost_models.formula import Formula, Number, Numeric, Priced, symbols
from autopar.cost_models.hardware import Device, MatmulCurve, canonical_dtype, dtype_bytes
from autopar.errors import UnpricedError

Direction: TypeAlias = Literal["forward", "backward"]
Mask: TypeAlias = Literal["none", "causal", "dense"]

ROOFLINE = "Williams, Waterman and Patterson, CACM 52(4), 2009 (roofline); curve: the profile's source"
_launch, _peak, _efficiency, _ramp, _tile = symbols("launch_s peak_flops_per_s efficiency ramp_s tile")
_rate, _vector = symbols("memory_bytes_per_s vector_flops_per_s")
_kernel, _host, _host_step = symbols("kernel_bytes_per_s host_bytes_per_s host_step_bytes_per_s")
_moved, _flops, _cache, _cache_rate = symbols("moved_bytes flops cache_bytes cache_bytes_per_s")
_batch, _m, _n, _k, _element = symbols("batch m n k element_bytes")
_MEMORY_UNITS = {"memory_bytes_per_s": "B/s", "cache_bytes": "B", "cache_bytes_per_s": "B/s"}


def _padded(size: sympy.Expr) -> sympy.Expr:
    return sympy.ceiling(size / _tile) * _tile


def _traffic_s(moved: sympy.Expr) -> sympy.Expr:
    """Seconds of memory traffic: what fits stays in the cache from one op to the next."""
    cached = sympy.Min(moved, _cache)
    return cached / _cache_rate + (moved - cached) / _rate


MATMUL = Formula(
    "matmul",
    _launch
    + sympy.Max(
        2 * _batch * _padded(_m) * _padded(_n) * _k / (_peak * _efficiency) + _ramp,
        _traffic_s(_element * _batch * (_m * _k + _k * _n + _m * _n)),
    ),
    {"batch": "", "m": "", "n": "", "k": "", "element_bytes": "B", "tile": "", "peak_flops_per_s": "FLOP/s",
     "efficiency": "", "ramp_s": "s", **_MEMORY_UNITS, "launch_s": "s"},
    ROOFLINE,
    leaves_out="wave quantization, power throttling, epilogues",
)  # fmt: skip
MEMORY_BOUND = Formula(
    "memory-bound op",
    _launch + sympy.Max(_traffic_s(_moved), _flops / _vector),
    {"moved_bytes": "B", "flops": "FLOP", **_MEMORY_UNITS, "vector_flops_per_s": "FLOP/s", "launch_s": "s"},
    ROOFLINE,
    leaves_out="strided access, more than one level of cache",
)  # fmt: skip
HOST_COPY = Formula(
    "copy to or from the host",
    _launch + _moved / _host,
    {"moved_bytes": "B", "host_bytes_per_s": "B/s", "launch_s": "s"},
    "the profile's host link",
    leaves_out="memory that is not pinned",
)
HOST_STEP = Formula(
    "optimizer step on the host",
    _moved / _host_step,
    {"moved_bytes": "B", "host_step_bytes_per_s": "B/s"},
    "memory-bound; the rate: see cost_models.hardware.HOST_STEP_BYTES_PER_S",
    leaves_out="what the device computes meanwhile",
)
KERNEL = Formula(
    "measured op",
    _launch + sympy.Max(_moved / _kernel, _traffic_s(_moved)),
    {"moved_bytes": "B", "kernel_bytes_per_s": "B/s", **_MEMORY_UNITS, "launch_s": "s"},
    "python -m autopar calibrate times the op on a few sizes",
    leaves_out="other shapes of the same size",
)
DENSE = Formula(
    "compute-bound op",
    _launch + sympy.Max(_flops / (_peak * _efficiency) + _ramp, _traffic_s(_moved)),
    {"flops": "FLOP", "moved_bytes": "B", "peak_flops_per_s": "FLOP/s", "efficiency": "", "ramp_s": "s",
     **_MEMORY_UNITS, "launch_s": "s"},
    ROOFLINE,
)  # fmt: skip


def matmul_seconds(device: Device, dtype: str, batch: Numeric, m: Numeric, n: Numeric, k: Numeric) -> Number:
    """Seconds of `batch` products of an (m, k) by a (k, n) matrix."""
    return matmul_price(device, dtype, batch, m, n, k).value


def matmul_price(device: Device, dtype: str, batch: Numeric, m: Numeric, n: Numeric, k: Numeric) -> Priced:
    """The price that `matmul_seconds` gives the value of."""
    return Priced(MATMUL, {"batch": batch, "m": m, "n": n, "k": k, **_matmul_numbers(device, dtype)})


def explain_matmul(device: Device, dtype: str, batch: Numeric, m: Numeric, n: Numeric, k: Numeric) -> str:
    """The formula of `matmul_seconds` with its numbers."""
    return MATMUL.explain(batch=batch, m=m, n=n, k=k, **_matmul_numbers(device, dtype))


def memory_bound_seconds(
    device: Device, moved_bytes: Numeric, dtype: str | None = None, flops: Numeric = 0.0
) -> Number:
    """Seconds of an op that mostly moves bytes (read plus written), with `flops` of vector arithmetic.

    Vector arithmetic runs at the float32 rate, or at the float64 rate for float64 and complex128 tensors.
    """
    return memory_bound_price(device, moved_bytes, dtype, flops).value


def memory_bound_price(device: Device, moved_bytes: Numeric, dtype: str | None = None, flops: Numeric = 0.0) -> Priced:
    """The price that `memory_bound_seconds` gives the value of."""
    return Priced(MEMORY_BOUND, {"moved_bytes": moved_bytes, "flops": flops, **_memory_numbers(device, dtype)})


def kernel_price(device: Device, op: str, moved_bytes: Numeric, dtype: str | None = None) -> Priced:
    """The price of one op that is no product: as it was measured on the device, else memory-bound.

    `op`: its name in `Device.kernels`, such as "aten.gelu".
    """
    cost = device.kernels.get(op)
    if cost is None:
        return memory_bound_price(device, moved_bytes, dtype)
    numbers = {"kernel_bytes_per_s": cost.bytes_per_s, "launch_s": cost.launch_s, **_memory_rates(device)}
    return Priced(KERNEL, {"moved_bytes": moved_bytes, **numbers}, label=op)


def explain_memory_bound(device: Device, moved_bytes: Numeric, dtype: str | None = None, flops: Numeric = 0.0) -> str:
    """The formula of `memory_bound_seconds` with its numbers."""
    return MEMORY_BOUND.explain(moved_bytes=moved_bytes, flops=flops, **_memory_numbers(device, dtype))


def convolution_seconds(
    device: Device, dtype: str, flops: Numeric, moved_bytes: Numeric, kind: str = "forward"
) -> Number:
    """Seconds of a convolution of `flops`, reading and writing `moved_bytes`; `kind`: see `hardware.CONVOLUTIONS`."""
    return convolution_price(device, dtype, flops, moved_bytes, kind).value


def convolution_price(
    device: Device, dtype: str, flops: Numeric, moved_bytes: Numeric, kind: str = "forward"
) -> Priced:
    """The price that `convolution_seconds` gives the value of."""
    efficiency = device.convolution_efficiency * device.convolution_shares.get(kind, 1.0)
    numbers = _dense_numbers(device, dtype, efficiency)
    return Priced(DENSE, {"flops": flops, "moved_bytes": moved_bytes, **numbers})


def attention_seconds(
    device: Device,
    dtype: str,
    batch: Numeric,
    heads: Numeric,
    q_len: Numeric,
    k_len: Numeric,
    head_dim: Numeric,
    *,
    direction: Direction = "forward",
    mask: Mask = "none",
    key_value_heads: Numeric | None = None,
) -> Number:
    """Seconds of fused attention; `key_value_heads` below `heads` is grouped-query attention.

    Forward is 2 matmuls per score, backward 5 (the scores are computed again). A causal mask leaves the device's
    `causal_fraction` of the scores.
    """
    causal, grouped = device.causal_fraction, key_value_heads
    work = attention_work(
        dtype, batch, heads, q_len, k_len, head_dim, direction=direction, mask=mask, key_value_heads=grouped,
        causal_fraction=causal,
    )  # fmt: skip
    return attention_price(device, dtype, *work, direction).value


def attention_price(device: Device, dtype: str, flops: Numeric, moved_bytes: Numeric, direction: Direction) -> Priced:
    """The price of fused attention of this `attention_work`."""
    forward = direction == "forward"
    efficiency = device.attention_forward_efficiency if forward else device.attention_backward_efficiency
    return Priced(DENSE, {"flops": flops, "moved_bytes": moved_bytes, **_dense_numbers(device, dtype, efficiency)})


def attention_work(
    dtype: str,
    batch: Any,
    heads: Any,
    q_len: Any,
    k_len: Any,
    head_dim: Any,
    *,
    direction: Direction = "forward",
    mask: Mask = "none",
    key_value_heads: Any = None,
    causal_fraction: float = 0.5,
) -> tuple[Any, Any]:
    """The flops of fused attention and the bytes it reads and writes.

    Source: Dao, FlashAttention-2, 2023, section 4.1: 4 (forward) and 10 (backward) flops per score and head dim.
    """
    if mask not in ("none", "causal", "dense"):
        raise UnpricedError(f"attention mask {mask!r} has no price", fix="use 'none', 'causal' or 'dense'")
    if direction not in ("forward", "backward"):
        raise UnpricedError(f"attention direction {direction!r} has no price", fix="use 'forward' or 'backward'")
    grouped = heads if key_value_heads is None else key_value_heads
    scores = batch * heads * q_len * k_len * (causal_fraction if mask == "causal" else 1.0)
    flops = (4 if direction == "forward" else 10) * scores * head_dim
    queries, keys = batch * heads * q_len * head_dim, batch * grouped * k_len * head_dim
    elements = 2 * queries + 2 * keys if direction == "forward" else 4 * queries + 4 * keys
    if mask == "dense":
        elements = elements + batch * q_len * k_len
    return flops, elements * dtype_bytes(dtype)


def optimizer_step_seconds(
    device: Device, parameter_bytes: Numeric, gradient_bytes: Numeric, state_bytes: Numeric
) -> Number:
    """Seconds of one fused optimizer step: parameters and states are read and written, gradients read."""
    return optimizer_step_price(device, parameter_bytes, gradient_bytes, state_bytes).value


def optimizer_step_price(
    device: Device, parameter_bytes: Numeric, gradient_bytes: Numeric, state_bytes: Numeric
) -> Priced:
    """The price that `optimizer_step_seconds` gives the value of."""
    moved = 2.0 * parameter_bytes + 1.0 * gradient_bytes + 2.0 * state_bytes
    return memory_bound_price(device, moved)


def host_step_price(device: Device, parameter_bytes: Numeric, gradient_bytes: Numeric, state_bytes: Numeric) -> Priced:
    """The price of an optimizer's step on the host: what `optimizer_step_price` moves, through the host's memory."""
    if device.is_host:
        return optimizer_step_price(device, parameter_bytes, gradient_bytes, state_bytes)
    moved = 2.0 * parameter_bytes + 1.0 * gradient_bytes + 2.0 * state_bytes
    return Priced(HOST_STEP, {"moved_bytes": moved, "host_step_bytes_per_s": device.host_step_bytes_per_s})


def host_copy_seconds(device: Device, moved_bytes: Numeric) -> Number:
    """Seconds of a copy between the device and pinned host memory, one way (offload or reload)."""
    return device.launch_s + 1.0 * moved_bytes / device.host_bytes_per_s


def host_copy_price(device: Device, moved_bytes: Numeric) -> Priced:
    """The price that `host_copy_seconds` gives the value of."""
    numbers = {"launch_s": device.launch_s, "host_bytes_per_s": device.host_bytes_per_s}
    return Priced(HOST_COPY, {"moved_bytes": moved_bytes, **numbers})


@lru_cache(maxsize=256)
def _matmul_numbers(device: Device, dtype: str) -> Mapping[str, float]:
    peak, curve = device.peak(dtype), _curve(device, dtype)
    numbers = {
        "peak_flops_per_s": peak,
        "efficiency": curve.efficiency,
        "ramp_s": curve.ramp_s,
        "tile": curve.tile,
        "element_bytes": dtype_bytes(dtype),
        "launch_s": device.launch_s,
    }
    return MappingProxyType(numbers | _memory_rates(device))


@lru_cache(maxsize=256)
def _dense_numbers(device: Device, dtype: str, fraction: float) -> Mapping[str, float]:
    numbers = dict(_matmul_numbers(device, dtype))
    del numbers["tile"], numbers["element_bytes"]
    return MappingProxyType(numbers | {"efficiency": numbers["efficiency"] * fraction})


@lru_cache(maxsize=256)
def _memory_numbers(device: Device, dtype: str | None) -> Mapping[str, float]:
    double = dtype is not None and canonical_dtype(dtype) in ("float64", "complex128")
    vector = device.peak("float64" if double else "float32")
    return MappingProxyType({"vector_flops_per_s": vector, "launch_s": device.launch_s, **_memory_rates(device)})


def _memory_rates(device: Device) -> dict[str, float]:
    memory_bytes_per_s = device.memory_bytes_per_s * device.memory_efficiency
    return {
        "memory_bytes_per_s": memory_bytes_per_s,
        "cache_bytes": device.cache_bytes,
        "cache_bytes_per_s": device.cache_bytes_per_s or memory_bytes_per_s,
    }


def _curve(device: Device, dtype: str) -> MatmulCurve:
    return device.matmul[canonical_dtype(dtype)]
