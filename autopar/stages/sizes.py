"""How a batch is cut into microbatches: the chunks of every dim that is a multiple of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import MicrobatchError
from autopar.passes.local_call import RankGeometry
from autopar.sharding.layout import Layout, shard_dim


@dataclass(frozen=True)
class BatchCut:
    """A batch of `size` samples in consecutive chunks of these `lengths`, one per microbatch."""

    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.lengths)

    @property
    def is_even(self) -> bool:
        return len(set(self.lengths)) == 1

    def can_cut(self, size: int) -> bool:
        """Whether a dim of `size` can be cut where the samples are: each sample has equally many of its elements."""
        return size > 0 and (size % self.size == 0 or (self.is_even and size % len(self.lengths) == 0))

    def chunk(self, size: int, microbatch: int) -> tuple[int, int]:
        """(offset, length) of a microbatch's part of a dim of `size`."""
        before = sum(self.lengths[:microbatch])
        return before * size // self.size, self.lengths[microbatch] * size // self.size


def cut_batch(size: int, microbatches: int) -> BatchCut:
    """Chunks as equal as can be: the last ones are a sample shorter where the batch does not divide."""
    if not 1 <= microbatches <= size:
        raise MicrobatchError(
            f"a batch of {size} cannot be cut into {microbatches} microbatches",
            fix=f"give microbatches= a number from 1 to {size}, or a larger batch",
        )
    length, rest = divmod(size, microbatches)
    return BatchCut((length + 1,) * rest + (length,) * (microbatches - rest))


@dataclass(frozen=True, slots=True)
class TimeGeometry(RankGeometry):
    """Where one microbatch stands on the axis of time: its chunks are those of the samples."""

    cut: BatchCut = BatchCut((1,))

    def chunk(self, shape: Sequence[int], layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
        offsets, lengths = [0] * len(shape), list(shape)
        dim = shard_dim(layout[0])
        if dim is not None:
            offsets[dim], lengths[dim] = self.cut.chunk(shape[dim], self.coordinates[0])
        return tuple(offsets), tuple(lengths)
