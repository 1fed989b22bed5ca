"""Op prices: rooflines hold, prices grow with work, what has no rate is an error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.compute import (
    attention_seconds,
    attention_work,
    convolution_seconds,
    explain_matmul,
    explain_memory_bound,
    host_copy_seconds,
    matmul_seconds,
    memory_bound_seconds,
    optimizer_step_seconds,
)
from autopar.cost_models.hardware import load_profile, profile_names
from autopar.errors import UnpricedError

sizes = st.integers(1, 30_000)
names = st.sampled_from(profile_names())


@given(names, sizes, sizes, sizes, st.integers(1, 64))
def test_no_matmul_beats_the_peak_or_the_memory(name: str, m: int, n: int, k: int, batch: int) -> None:
    device = load_profile(name).device
    seconds = float(matmul_seconds(device, "float32", batch, m, n, k))
    assert seconds >= 2 * batch * m * n * k / device.peak("float32")
    fastest = max(device.memory_bytes_per_s, device.cache_bytes_per_s)
    assert seconds >= 4 * batch * (m * k + k * n + m * n) / fastest


@given(names, sizes, sizes, sizes)
def test_a_larger_matmul_never_takes_less_time(name: str, m: int, n: int, k: int) -> None:
    device = load_profile(name).device
    price = matmul_seconds(device, "float32", 1, m, n, k)
    for larger in ((m + 1, n, k), (m, n + 1, k), (m, n, k + 1)):
        assert matmul_seconds(device, "float32", 1, *larger) >= price


@given(st.lists(sizes, min_size=1, max_size=6))
def test_bulk_matmul_prices_agree_with_one_at_a_time(rows: list[int]) -> None:
    device = load_profile("h100").device
    bulk = matmul_seconds(device, "bfloat16", 1, np.array(rows), 512, 1024)
    single = [matmul_seconds(device, "bfloat16", 1, m, 512, 1024) for m in rows]
    np.testing.assert_allclose(np.asarray(bulk), np.array(single))


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [("a100-80", "bfloat16", 271.2), ("h100", "bfloat16", 794.5), ("h100", "float8", 1402.6)],
)
def test_a_large_matmul_sustains_most_of_the_best_measured_rate(name: str, dtype: str, tflops: float) -> None:
    """Best rates: stas00/ml-engineering, MAMF table. Sustained in long runs: 65 to 100 % of it."""
    seconds = float(matmul_seconds(load_profile(name).device, dtype, 1, 8192, 8192, 8192))
    assert 0.65 * tflops < 2 * 8192**3 / seconds / 1e12 < tflops


def test_a_dtype_without_a_rate_is_unpriced() -> None:
    with pytest.raises(UnpricedError, match="float8"):
        matmul_seconds(load_profile("a100-80").device, "float8_e4m3fn", 1, 8, 8, 8)
    with pytest.raises(UnpricedError, match="int64"):
        convolution_seconds(load_profile("h100").device, "int64", 1e9, 1e6)


@given(names, st.floats(0, 1e12))
def test_a_memory_bound_op_takes_at_least_its_bytes_and_its_launch(name: str, moved: float) -> None:
    device = load_profile(name).device
    seconds = float(memory_bound_seconds(device, moved))
    fastest = max(device.memory_bytes_per_s, device.cache_bytes_per_s)
    assert seconds >= max(device.launch_s, moved / fastest)


def test_vector_arithmetic_bounds_an_op_with_many_flops() -> None:
    device = load_profile("h100").device
    assert memory_bound_seconds(device, 1e6, "float32", flops=67e12) == pytest.approx(1.0, rel=0.01)
    assert memory_bound_seconds(load_profile("b200").device, 1e6, "float64", flops=40e12) == pytest.approx(1, rel=0.01)


@given(st.sampled_from(["forward", "backward"]), sizes)
def test_a_causal_mask_halves_the_flops_of_attention(direction: str, length: int) -> None:
    whole, _ = attention_work("bfloat16", 2, 8, length, length, 64, direction=direction)  # type: ignore[arg-type]
    causal, _ = attention_work("bfloat16", 2, 8, length, length, 64, direction=direction, mask="causal")  # type: ignore[arg-type]
    assert causal == whole / 2


def test_attention_backward_costs_more_than_forward_and_grouped_heads_move_less() -> None:
    device = load_profile("h100").device
    shape = (4, 32, 4096, 4096, 128)
    forward = float(attention_seconds(device, "bfloat16", *shape, mask="causal"))
    backward = float(attention_seconds(device, "bfloat16", *shape, mask="causal", direction="backward"))
    assert 2 < backward / forward < 4
    _, whole = attention_work("bfloat16", *shape)
    _, grouped = attention_work("bfloat16", *shape, key_value_heads=8)
    assert grouped < whole


def test_an_unknown_mask_or_direction_is_unpriced() -> None:
    device = load_profile("h100").device
    with pytest.raises(UnpricedError, match="sliding"):
        attention_seconds(device, "bfloat16", 1, 1, 8, 8, 8, mask="sliding")  # type: ignore[arg-type]
    with pytest.raises(UnpricedError, match="sideways"):
        attention_seconds(device, "bfloat16", 1, 1, 8, 8, 8, direction="sideways")  # type: ignore[arg-type]


def test_an_optimizer_step_moves_parameters_and_states_twice() -> None:
    device = load_profile("h100").device
    assert optimizer_step_seconds(device, 4e9, 4e9, 8e9) == memory_bound_seconds(device, 28e9)


def test_a_host_copy_is_bound_by_the_host_link() -> None:
    device = load_profile("h100").device
    assert host_copy_seconds(device, 50e9) == pytest.approx(1.0, rel=1e-3)


def test_explanations_name_the_roofline() -> None:
    device = load_profile("h100").device
    assert "roofline" in explain_matmul(device, "bfloat16", 1, 64, 64, 64)
    assert "moved_bytes = 1 GB" in explain_memory_bound(device, 1e9)
