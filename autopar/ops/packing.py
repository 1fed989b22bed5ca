"""Saved values in other forms between the phases: on the host, as bits, in fewer bits with a scale.

A copy to the host or back is started by one op and waited for by another, so that computation may run beside it. On
CUDA it runs on a stream of its own, one per direction, to and from pinned memory; on CPU the host's memory is a pool
beside the device's, which `autopar.runtime.memory_tracker` counts apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar.ops.define import fake_of, op

BITS = 8  # to a byte
BITS_AT_ONCE = 1 << 24  # elements: bounds what packing bits holds beside its operands
BLOCK = 256  # elements that share a scale
COPIED = "copied"  # the attribute of a copy that is under way: the event of its end


@cache
def _copy_stream(device: torch.device, direction: str) -> Any:
    """The stream for copies of one direction: the two run beside each other, as the link is duplex."""
    make: Callable[..., Any] = torch.cuda.Stream
    return make(device=device)


def _copied_beside(target: Tensor, source: Tensor, device: torch.device, direction: str) -> Tensor:
    """Start copying; an event in the target's own attributes tells when it is done."""
    stream = _copy_stream(device, direction)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    vars(target)[COPIED] = stream.record_event()
    return target


@op("offload(Tensor x) -> Tensor")
def offload(x: Tensor) -> Tensor:
    """Start to copy `x` to the host; `wait_copy` says when the result is there, and until then `x` must live."""
    if x.device.type != "cuda":
        return x.clone()
    host = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, pin_memory=True)
    return _copied_beside(host, x, x.device, "to the host")


@op("reload(Tensor host, Device device) -> Tensor")
def reload(host: Tensor, device: torch.device) -> Tensor:
    """Start to copy what `offload` gave back to `device`."""
    if device.type != "cuda":
        return host.clone()
    device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    x = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
    return _copied_beside(x, host, device, "from the host")


@op("wait_copy(Tensor copy, Tensor source) -> Tensor")
def wait_copy(copy: Tensor, source: Tensor) -> Tensor:
    """`copy` itself, once it is complete; `source`, what it is a copy of, lives until then."""
    event = vars(copy).get(COPIED)
    if event is not None:
        device = copy.device if copy.device.type == "cuda" else source.device
        torch.cuda.current_stream(device).wait_event(event)
    return copy


@op("pack_bits(Tensor x) -> Tensor")
def pack_bits(x: Tensor) -> Tensor:
    """uint8, a bit per element in logical order: whether a bool is true, or a number is not at or below zero."""
    flat = x.reshape(-1)
    packed = torch.empty(-(-flat.numel() // BITS), dtype=torch.uint8, device=x.device)
    for start in range(0, flat.numel(), BITS_AT_ONCE):
        part = flat[start : start + BITS_AT_ONCE]
        bits = (part if x.dtype == torch.bool else part.le(0).logical_not_()).view(torch.uint8)
        bits = torch.nn.functional.pad(bits, (0, -bits.numel() % BITS)).view(-1, BITS)
        into = packed[start // BITS : start // BITS + len(bits)].copy_(bits[:, 0])
        for place in range(1, BITS):
            into |= bits[:, place] << place
    return packed


@op("unpack_bits(Tensor packed, SymInt[] size, SymInt[] stride, ScalarType dtype) -> Tensor")
def unpack_bits(packed: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What `pack_bits` had, as ones and zeros of a dtype."""
    out = torch.empty_strided(size, stride, dtype=dtype, device=packed.device)
    flat = out.view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=dtype, device=packed.device)
    places = torch.arange(BITS, dtype=torch.uint8, device=packed.device)
    for start in range(0, flat.numel(), BITS_AT_ONCE):
        part = flat[start : start + BITS_AT_ONCE]
        bytes_ = packed[start // BITS : -(-(start + part.numel()) // BITS)]
        part.copy_((bytes_[:, None] >> places).bitwise_and_(1).view(-1)[: part.numel()])
    return out if out.is_contiguous() else out.copy_(flat.view(out.shape))


@op("quantize(Tensor x, ScalarType dtype) -> (Tensor, Tensor)")
def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(values of `dtype`, the scale of each block of `BLOCK` in float32), in logical order.

    int8: off by less than 1/127 of the largest magnitude of the block; float8: by at most 1/16 of each element, or by
    1/2^17 of the block's largest where that is more. No element loses its sign to zero, for the gradients of ReLUs
    depend on it. Elements that are not finite make those of their block so.
    """
    flat = x.reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK).to(torch.float32)
    scale = blocks.abs().amax(1).div_(_largest(dtype))
    values = blocks.div_(torch.where(scale > 0, scale, 1.0)[:, None])
    rounded = values.round() if dtype == torch.int8 else values.to(dtype).to(torch.float32)
    least = 1.0 if dtype == torch.int8 else torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    lost = (rounded == 0) & (values != 0)
    rounded = torch.where(lost, values.sign_().mul_(least), rounded)
    return rounded.to(dtype).view(-1)[: flat.numel()].clone(), scale


@op("dequantize(Tensor values, Tensor scale, SymInt[] size, SymInt[] stride, ScalarType dtype) -> Tensor")
def dequantize(values: Tensor, scale: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """About what `quantize` had."""
    padded = torch.nn.functional.pad(values.to(torch.float32), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    flat = padded.mul_(scale[:, None]).view(-1)[: values.numel()]
    return torch.empty_strided(size, stride, dtype=dtype, device=values.device).copy_(flat.view(torch.Size(size)))


def _largest(dtype: torch.dtype) -> float:
    return float(torch.iinfo(dtype).max if dtype == torch.int8 else torch.finfo(dtype).max)


@fake_of("offload")
def _(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu")


@fake_of("reload")
def _(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)


@fake_of("wait_copy")
def _(copy: Tensor, source: Tensor) -> Tensor:
    return copy


@fake_of("pack_bits")
def _(x: Tensor) -> Tensor:
    return x.new_empty(-(-x.numel() // BITS), dtype=torch.uint8)


@fake_of("unpack_bits")
def _(packed: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=packed.device)


@fake_of("quantize")
def _(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.numel(), dtype=dtype), x.new_empty(-(-x.numel() // BLOCK), dtype=torch.float32)


@fake_of("dequantize")
def _(values: Tensor, scale: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=values.device)
