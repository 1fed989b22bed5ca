"""Windows: what an op reads of a dim of its input for a stretch of the same dim of its result.

An op that slides a window over a dim (a convolution, a pool, an interpolation) needs, for a stretch of its results, a
stretch of its inputs and a call on that stretch alone. So a rank that holds a chunk fetches from other ranks what its
window reads of theirs: its halo.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

from autopar.sharding.layout import chunk


@dataclass(frozen=True, slots=True)
class Frame:
    """The inputs [start, stop) of one call, of whose `outputs` results a stretch begins behind the first `skip`.

    Beyond the edges of the input there are zeros. `padding`: what the call itself adds before and after.
    """

    start: int
    stop: int
    skip: int
    outputs: int
    padding: tuple[int, int] = (0, 0)


class Window(Protocol):
    """How an op reads a dim of `size` for `results` results."""

    @property
    def size(self) -> int: ...
    @property
    def results(self) -> int: ...
    def __hash__(self) -> int: ...
    def frame(self, first: int, count: int) -> Frame:
        """The call that makes the results [first, first + count)."""


@dataclass(frozen=True, slots=True)
class Sliding:
    """Result o reads the inputs o * stride - padding + dilation * [0, kernel), zeros outside: a convolution."""

    size: int
    results: int
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def frame(self, first: int, count: int) -> Frame:
        start = first * self.stride - self.padding
        return Frame(start, start + (count - 1) * self.stride + self.dilation * (self.kernel - 1) + 1, 0, count)


@dataclass(frozen=True, slots=True)
class Pooling:
    """As `Sliding`, but what lies outside is no number: the call pads, so it starts at a multiple of the stride."""

    size: int
    results: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    ceil_mode: bool

    def frame(self, first: int, count: int) -> Frame:
        before = min(first, -(-self.padding // self.stride))  # calls whose windows would begin in the call's padding
        start = (first - before) * self.stride
        stop = min(self.size, (first + count - 1) * self.stride - self.padding + self._span)
        return Frame(start, stop, before, self._outputs(stop - start), (self.padding, self.padding))

    @property
    def _span(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    def _outputs(self, size: int) -> int:
        """PyTorch's pooling_output_shape: with ceil_mode, the last window must begin inside the input or before it."""
        rounding = self.stride - 1 if self.ceil_mode else 0
        count = (size + 2 * self.padding - self._span + rounding) // self.stride + 1
        return count - (self.ceil_mode and (count - 1) * self.stride >= size + self.padding)


@dataclass(frozen=True, slots=True)
class Transposed:
    """Input i adds to the results i * stride - padding + dilation * [0, kernel): a transposed convolution.

    The call pads nothing; results that no input reaches behind the last one are its output padding.
    """

    size: int
    results: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    def frame(self, first: int, count: int) -> Frame:
        last, reach = first + count - 1, self.dilation * (self.kernel - 1)
        reached_from = -(-(first + self.padding - reach) // self.stride)
        start = max(0, min(reached_from, (first + self.padding) // self.stride, self.size - 1))
        stop = max(start + 1, min(self.size, (last + self.padding) // self.stride + 1))
        origin = start * self.stride - self.padding
        outputs = (stop - start - 1) * self.stride + reach + 1
        missing = max(0, last + 1 - origin - outputs)
        return Frame(start, stop, first - origin, outputs + missing, (0, missing))


@dataclass(frozen=True, slots=True)
class Resampled:
    """Results as dense as the inputs times a power of two, so that positions are exact in every precision.

    A block is one input and its results, or one result and its inputs; a result reads `reach` blocks to either side.
    """

    size: int
    results: int
    reach: int

    def frame(self, first: int, count: int) -> Frame:
        up, down = max(1, self.results // self.size), max(1, self.size // self.results)
        low = max(0, first // up - self.reach)
        high = min(self.size // down, (first + count - 1) // up + 1 + self.reach)
        return Frame(low * down, high * down, first - low * up, (high - low) * up)


@dataclass(frozen=True, slots=True)
class Padded:
    """The results are the inputs behind `before` more (or fewer, where negative).

    `mirrored`: padding repeats inputs from as far inside as it reaches outside; else it reads none, or the outermost.
    """

    size: int
    results: int
    before: int
    mirrored: bool = False

    def frame(self, first: int, count: int) -> Frame:
        end = first + count
        start = min(max(0, first - self.before), self.size - 1)
        stop = min(self.size, max(start + 1, end - self.before))
        left, right = max(0, start + self.before - first), max(0, end - self.before - stop)
        if self.mirrored:
            stop = max(stop, left + 1) if left else stop
            start = min(start, self.size - right - 1) if right else start
        skip = first - (start + self.before - left)
        return Frame(start, stop, skip, left + stop - start + right, (left, right))


@dataclass(frozen=True, slots=True)
class Halo:
    """What an op's ranks exchange along one dim that their axis cuts.

    `row_bytes`: of one position of the dim, in the full tensor. `tensor`: the tensor input that other axes cut as they
    cut what is sent. `rounds`: how often it is sent: fetched, or its gradient returned, or both.
    """

    window: Window
    row_bytes: int
    tensor: int = 0
    rounds: int = 1


def frame_of(window: Window, ranks: int, rank: int) -> Frame:
    """The call of one of the ranks that share the results in chunks."""
    return window.frame(*chunk(window.results, ranks, rank))


@cache
def halo_rows(window: Window, ranks: int) -> int:
    """The most inputs that a rank reads of other ranks' chunks."""
    return max(_foreign(window, ranks, rank) for rank in range(ranks))


@cache
def frames_are_chunks(window: Window, ranks: int) -> bool:
    """Whether every rank reads just the chunk that it holds."""
    chunks = (chunk(window.size, ranks, rank) for rank in range(ranks))
    frames = (frame_of(window, ranks, rank) for rank in range(ranks))
    return all((it.start, it.stop - it.start) == held for it, held in zip(frames, chunks, strict=True))


def _foreign(window: Window, ranks: int, rank: int) -> int:
    frame, (start, length) = frame_of(window, ranks, rank), chunk(window.size, ranks, rank)
    inside = max(0, min(frame.stop, window.size) - max(frame.start, 0))
    own = max(0, min(frame.stop, start + length) - max(frame.start, start))
    return inside - own
