"""A window's frame, called on alone, gives the stretch of results that the op gives on the whole."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.sharding.layout import chunk
from autopar.sharding.windows import (
    Frame,
    Padded,
    Pooling,
    Resampled,
    Sliding,
    Transposed,
    Window,
    frame_of,
    frames_are_chunks,
    halo_rows,
)

Call = Callable[[Tensor, tuple[int, int], int], Tensor]  # (inputs, the call's own padding, number of results)
Case = tuple[Tensor, Tensor, Window, Call]  # (inputs, results, window, call)
TRIALS = 60


def real(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64)


def numbers(draw: random.Random) -> tuple[int, int, int, int, int]:
    """(size, kernel, stride, padding, dilation)."""
    return draw.randint(2, 14), draw.randint(1, 4), draw.randint(1, 4), draw.randint(0, 3), draw.randint(1, 2)


def convolution(draw: random.Random) -> Case:
    size, kernel, stride, padding, dilation = numbers(draw)
    source, weight = real(1, 1, size), real(1, 1, kernel)
    whole = F.conv1d(source, weight, None, stride, padding, dilation)
    window = Sliding(size, whole.shape[2], kernel, stride, padding, dilation)
    return source, whole, window, lambda part, own, _: F.conv1d(part, weight, None, stride, own[0], dilation)


def transposed(draw: random.Random) -> Case:
    size, kernel, stride, padding, dilation = numbers(draw)
    source, weight, last = real(1, 1, size), real(1, 1, kernel), draw.randint(0, max(stride, dilation) - 1)
    whole = F.conv_transpose1d(source, weight, None, stride, padding, last, 1, dilation)
    window = Transposed(size, whole.shape[2], kernel, stride, padding, dilation)
    return (
        source,
        whole,
        window,
        lambda part, own, _: F.conv_transpose1d(part, weight, None, stride, 0, own[1], 1, dilation),
    )


def max_pool(draw: random.Random) -> Case:
    size, kernel, stride, padding, dilation = numbers(draw)
    padding, ceil = min(padding, kernel // 2), draw.random() < 0.5
    source = real(1, 1, size)
    whole = F.max_pool1d(source, kernel, stride, padding, dilation, ceil)
    window = Pooling(size, whole.shape[2], kernel, stride, padding, dilation, ceil)
    return source, whole, window, lambda part, own, _: F.max_pool1d(part, kernel, stride, own[0], dilation, ceil)


def average_pool(draw: random.Random) -> Case:
    size, kernel, stride, padding, _ = numbers(draw)
    padding, ceil, counted = min(padding, kernel // 2), draw.random() < 0.5, draw.random() < 0.5
    source = real(1, 1, size)
    whole = F.avg_pool1d(source, kernel, stride, padding, ceil, counted)
    window = Pooling(size, whole.shape[2], kernel, stride, padding, 1, ceil)
    return source, whole, window, lambda part, own, _: F.avg_pool1d(part, kernel, stride, own[0], ceil, counted)


def interpolation(draw: random.Random) -> Case:
    mode, factor = draw.choice(["nearest", "nearest-exact", "linear"]), draw.choice([0.25, 0.5, 1, 2, 4])
    source = real(1, 1, 4 * draw.randint(1, 4))
    whole = F.interpolate(source, int(source.shape[2] * factor), mode=mode)
    window = Resampled(source.shape[2], whole.shape[2], int(mode == "linear" and factor >= 1))
    return source, whole, window, lambda part, _, count: F.interpolate(part, count, mode=mode)


def padding(draw: random.Random) -> Case:
    mode = draw.choice(["reflect", "replicate", "constant"])
    least = -1 if mode == "constant" else 0
    source, amounts = real(1, 1, draw.randint(2, 14)), (draw.randint(least, 4), draw.randint(least, 4))
    whole = F.pad(source, amounts, mode=mode)
    window = Padded(source.shape[2], whole.shape[2], amounts[0], mode == "reflect")
    return source, whole, window, lambda part, own, _: F.pad(part, own, mode=mode)


def part_of(source: Tensor, frame: Frame) -> Tensor:
    """The inputs of a call, zeros beyond the edges."""
    before, after = max(0, -frame.start), max(0, frame.stop - source.shape[2])
    length = frame.stop - frame.start
    inside = source[:, :, max(0, frame.start) : max(0, min(source.shape[2], frame.stop))]
    return F.pad(inside, (min(before, length), min(after, length)))


@pytest.mark.parametrize("kind", [convolution, transposed, max_pool, average_pool, interpolation, padding])
def test_the_call_on_a_frame_gives_the_results_of_the_whole(kind: Callable[[random.Random], Case]) -> None:
    draw, checked = random.Random(0), 0
    torch.manual_seed(0)
    for _ in range(TRIALS):
        try:
            source, whole, window, call = kind(draw)
        except RuntimeError:  # sizes that the op refuses
            continue
        for ranks in (2, 3):
            for rank in range(ranks if window.results >= ranks else 0):
                first, count = chunk(window.results, ranks, rank)
                if not count:
                    continue
                frame = frame_of(window, ranks, rank)
                results = call(part_of(source, frame), frame.padding, frame.outputs)
                assert results.shape[2] == frame.outputs, (window, frame)
                kept = results[:, :, frame.skip : frame.skip + count]
                torch.testing.assert_close(kept, whole[:, :, first : first + count], rtol=1e-12, atol=1e-12)
                checked += 1
    assert checked > TRIALS


def test_a_rank_in_the_middle_fetches_a_row_from_either_side_for_a_kernel_of_three() -> None:
    assert [halo_rows(Sliding(32, 32, 3, padding=1), ranks) for ranks in (2, 4)] == [1, 2]
    assert not frames_are_chunks(Sliding(32, 32, 3, padding=1), 2)


def test_windows_that_lie_side_by_side_fetch_nothing() -> None:
    for window in (Sliding(32, 32, 1), Sliding(32, 8, 4, 4), Pooling(32, 16, 2, 2, 0, 1, ceil_mode=False)):
        assert halo_rows(window, 4) == 0
        assert frames_are_chunks(window, 4)
