"""Liveness, optimizer state and the closed memory formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.memory import (
    Buffer,
    factored_state_elements,
    liveness_timeline,
    optimizer_state_bytes,
    peak_bytes,
    reserved_bytes,
    rounded_bytes,
)
from autopar.cost_models.model_memory import (
    SavedTensors,
    first_stage_peak_bytes,
    layer_activation_bytes,
    model_state_bytes,
)
from autopar.cost_models.transformer import TransformerPlan, TransformerShape
from autopar.errors import UnpricedError

OPS = 12


@st.composite
def buffers(draw: st.DrawFn) -> Buffer:
    start = draw(st.integers(0, OPS - 1))
    end = draw(st.none() | st.integers(start, OPS + 2))
    kind = draw(st.sampled_from(["parameter", "activation", "saved"]))
    return Buffer("x", kind, draw(st.integers(0, 5000)), start, end)


@given(st.lists(buffers(), max_size=8))
def test_the_timeline_is_the_sum_of_what_is_alive(items: list[Buffer]) -> None:
    timeline = liveness_timeline(items, OPS)
    for index in range(OPS):
        assert timeline.total_bytes[index] == sum(rounded_bytes(item.bytes_) for item in timeline.alive_at(index))
    assert timeline.peak_bytes == timeline.total_bytes.max() == peak_bytes(items, OPS)
    assert sum(timeline.peak_by_kind().values()) == timeline.peak_bytes


def test_the_tensors_alive_at_the_peak_come_largest_first() -> None:
    small, large = Buffer("a", "saved", 512, 0, 3), Buffer("b", "activation", 2048, 1, 2, where="model.py:7")
    timeline = liveness_timeline([small, large, Buffer("c", "input", 512, 2)], 4)
    assert (timeline.peak_bytes, timeline.peak_index) == (2560, 1)
    assert timeline.alive_at_peak() == (large, small)
    np.testing.assert_array_equal(timeline.bytes_by_kind["activation"], [0, 2048, 0, 0])


def test_a_buffer_freed_before_it_is_made_is_refused() -> None:
    with pytest.raises(ValueError, match="allocated at 3, freed at 1"):
        liveness_timeline([Buffer("a", "saved", 1, 3, 1)], 4)
    with pytest.raises(ValueError, match="at least one op"):
        liveness_timeline([], 0)


def test_reserved_memory_is_above_allocated_memory() -> None:
    assert reserved_bytes(10**9) > 10**9


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1)),
        ("momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("adam", lambda p: torch.optim.Adam(p)),
        ("adamw", lambda p: torch.optim.AdamW(p)),
        ("adamw_amsgrad", lambda p: torch.optim.AdamW(p, amsgrad=True)),
        ("adagrad", lambda p: torch.optim.Adagrad(p)),
        ("adadelta", lambda p: torch.optim.Adadelta(p)),
        ("adamax", lambda p: torch.optim.Adamax(p)),
        ("nadam", lambda p: torch.optim.NAdam(p)),
        ("radam", lambda p: torch.optim.RAdam(p)),
        ("rmsprop", lambda p: torch.optim.RMSprop(p)),
        ("rprop", lambda p: torch.optim.Rprop(p)),
        ("asgd", lambda p: torch.optim.ASGD(p)),
        ("adafactor", lambda p: torch.optim.Adafactor(p)),
    ],
)
@pytest.mark.parametrize("shape", [(48, 32), (40,)])
def test_the_state_of_an_optimizer_is_what_torch_keeps(name: str, make: object, shape: tuple[int, ...]) -> None:
    parameter = torch.nn.Parameter(torch.ones(shape))
    optimizer = make([parameter])  # type: ignore[operator]
    parameter.grad = torch.ones(shape)
    optimizer.step()
    kept = [item for item in optimizer.state[parameter].values() if isinstance(item, torch.Tensor) and item.numel() > 1]
    measured = sum(item.numel() * item.element_size() for item in kept)
    assert optimizer_state_bytes(4 * parameter.numel(), name, shape=shape) == measured


def test_quantized_states_take_a_quarter_and_small_tensors_stay_whole() -> None:
    assert optimizer_state_bytes(4 * 2**20, "adam8bit") == 2 * (2**20 + 4 * 2**12)
    assert optimizer_state_bytes(4 * 1000, "adam8bit") == 8000
    assert optimizer_state_bytes(2 * 100, "adamw", parameter_dtype="bfloat16", state_dtype="float32") == 800


def test_an_unknown_optimizer_is_unpriced_and_a_factored_one_needs_its_shape() -> None:
    with pytest.raises(UnpricedError, match="shampoo"):
        optimizer_state_bytes(4, "shampoo")
    with pytest.raises(UnpricedError, match="shape"):
        optimizer_state_bytes(4, "adafactor")
    assert factored_state_elements((2, 5, 7)) == 24


def test_activations_of_the_five_modes_shrink_in_the_papers_order() -> None:
    sizes = {"seq": 2048, "batch": 1, "hidden": 12288, "heads": 96, "tensor": 8}
    modes = ("single", "tensor", "sequence", "selective", "sequence_selective", "full")
    values = [layer_activation_bytes(mode, **sizes) for mode in modes]
    assert values == sorted(values, reverse=True)
    with pytest.raises(UnpricedError, match="unknown"):
        layer_activation_bytes("half", **sizes)


def test_zero_states_are_those_of_the_papers_figure() -> None:
    figure = {"replicated": 120, "zero1": 31.4, "zero2": 16.6, "zero3": 1.9}
    for storage, gigabytes in figure.items():
        assert model_state_bytes(storage, 7.5e9, 64) / 1e9 == pytest.approx(gigabytes, abs=0.05)
    with pytest.raises(UnpricedError, match="zero9"):
        model_state_bytes("zero9", 1)


def test_the_first_stage_holds_a_microbatch_for_every_rank_behind_it() -> None:
    shape = TransformerShape(layers=16, hidden=64, heads=4, ffn=256, vocab=100, seq=32)
    saved = SavedTensors(0, 10, 0, "a test", state_bytes=0, sharded_state_bytes=0)
    peaks = [
        first_stage_peak_bytes(shape, TransformerPlan(pipeline=4, microbatches=many), saved) for many in (1, 2, 4, 8)
    ]
    assert peaks[0] < peaks[1] < peaks[2] == peaks[3]
