"""What is packed comes back: exactly, or within the error that the form states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.passes.packings import FORM_NAMED

ops = torch.ops.autopar
SHAPES = [(7,), (3, 5, 9), (2, 3, 8, 8), (0,), ()]


def unpacked(packed: Tensor, like: Tensor) -> Tensor:
    back: Tensor = ops.unpack_bits(packed, list(like.shape), list(like.stride()), like.dtype)
    assert back.stride() == like.stride() and back.dtype == like.dtype
    return back


@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [*((shape, torch.contiguous_format) for shape in SHAPES), ((2, 3, 8, 8), torch.channels_last)],
)
def test_bits_hold_bools_and_what_is_above_zero(shape: tuple[int, ...], memory_format: torch.memory_format) -> None:
    x = torch.randn(shape).contiguous(memory_format=memory_format)
    for value in (x, x > 0, x.bfloat16(), x.double()):
        packed = ops.pack_bits(value)
        assert packed.numel() == FORM_NAMED["bits"].bytes_(value.numel(), value.dtype)
        assert torch.equal(unpacked(packed, value) > 0, value > 0)


def test_a_relu_passes_on_the_gradients_of_what_is_no_number_and_of_no_zero() -> None:
    x = torch.tensor([1.0, 0.0, -0.0, -2.0, float("nan"), float("inf"), 1e-45])
    backward = torch.ops.aten.threshold_backward.default
    from_bits = backward(torch.ones_like(x), unpacked(ops.pack_bits(x), x), 0)
    assert torch.equal(from_bits, backward(torch.ones_like(x), x, 0))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_fewer_bits_are_within_the_stated_error_and_keep_signs(dtype: torch.dtype, scale: float) -> None:
    name = "compress-int8" if dtype == torch.int8 else "compress-fp8"
    torch.manual_seed(0)
    x = torch.randn(33, 77) * torch.logspace(-6, 0, 77) * scale
    x[0, :5] = 0.0
    values, scales = ops.quantize(x, dtype)
    assert values.nbytes + scales.nbytes == FORM_NAMED[name].bytes_(x.numel(), x.dtype)
    back = ops.dequantize(values, scales, list(x.shape), list(x.stride()), x.dtype)
    assert float((back - x).abs().max() / x.abs().max()) <= FORM_NAMED[name].error
    assert torch.equal(back.sign(), x.sign())


def test_what_is_not_finite_is_not_hidden() -> None:
    x = torch.ones(600)
    x[300] = float("inf")
    back = ops.dequantize(*ops.quantize(x, torch.int8), [600], [1], torch.float32)
    assert not back[256:512].isfinite().any() and torch.equal(back[:256], x[:256])


def test_a_copy_to_the_host_and_back_is_the_same_tensor() -> None:
    x = torch.randn(4, 6).t()
    host = ops.wait_copy(ops.offload(x), x)
    back = ops.wait_copy(ops.reload(host, x.device), host)
    assert torch.equal(back, x) and back.stride() == x.stride() and host.data_ptr() != x.data_ptr() != back.data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies beside computation need a CUDA device")
def test_copies_on_cuda_run_beside_computation_and_are_waited_for() -> None:
    x = torch.randn(1 << 22, device="cuda")
    host = ops.offload(x)
    assert host.is_pinned() and host.device.type == "cpu"
    back = ops.wait_copy(ops.reload(ops.wait_copy(host, x), x.device), host)
    assert torch.equal(back, x)
