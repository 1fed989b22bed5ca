"""Layouts: one placement per mesh axis, and where a shard's elements lie in the full tensor.

Shards follow `torch.distributed.tensor`: a dim of size n over r ranks is cut in chunks of ceil(n / r), so that only
trailing shards are short (or empty); axes that shard one dim nest from left to right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.errors import PlanFormatError

Layout = tuple[Placement, ...]

REPLICATE = Replicate()


def replicated(axes: int) -> Layout:
    """The layout that holds the full tensor on every rank."""
    return (REPLICATE,) * axes


def shard_dim(placement: Placement) -> int | None:
    """The tensor dim that `placement` cuts, or None."""
    return placement.dim if isinstance(placement, Shard) else None


def is_partial(placement: Placement) -> bool:
    """Whether ranks hold addends (or maxima, ...) of the value rather than the value."""
    return isinstance(placement, Partial)


def chunk(size: int, ranks: int, coordinate: int) -> tuple[int, int]:
    """(offset, length) of one rank's chunk of a dim of `size`: ceil-sized, trailing chunks short or empty."""
    step = -(-size // ranks)
    start = min(size, step * coordinate)
    return start, min(size, start + step) - start


def local_chunk(
    shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int], coordinates: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, lengths) per dim of the shard that the rank at `coordinates` holds of a tensor of `shape`."""
    offsets, lengths = [0] * len(shape), list(shape)
    for placement, ranks, coordinate in zip(layout, mesh_shape, coordinates, strict=True):
        dim = shard_dim(placement)
        if dim is not None:
            start, lengths[dim] = chunk(lengths[dim], ranks, coordinate)
            offsets[dim] += start
    return tuple(offsets), tuple(lengths)


def local_shape(shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """The largest shard's shape: the one of the rank at the origin of the mesh."""
    return local_chunk(shape, layout, mesh_shape, (0,) * len(mesh_shape))[1]


def ranks_per_dim(rank: int, layout: Layout, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """How many ways each dim of a tensor of `rank` dims is cut."""
    ways = [1] * rank
    for placement, ranks in zip(layout, mesh_shape, strict=True):
        dim = shard_dim(placement)
        if dim is not None:
            ways[dim] *= ranks
    return tuple(ways)


def format_placement(placement: Placement) -> str:
    """`S0`, `R`, `P` (sum) or `P(max)`: the form used in plans."""
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    return "R"


def format_layout(layout: Layout) -> str:
    """Placements by mesh axis, as in `S0,R`."""
    return ",".join(map(format_placement, layout))


def parse_placement(text: str) -> Placement:
    """The inverse of `format_placement`; PlanFormatError for anything else."""
    word = text.strip()
    if word == "R":
        return REPLICATE
    if word == "P":
        return Partial()
    if word.startswith("P(") and word.endswith(")") and word[2:-1] in ("sum", "max", "min", "avg"):
        return Partial(word[2:-1])
    if re.fullmatch(r"S[0-9]{1,3}", word):
        return Shard(int(word[1:]))
    raise PlanFormatError(
        f"{text!r} is no placement", fix="write R (replicate), S0, S1, ... (shard that dim), P or P(max) (partial)"
    )


def parse_layout(text: str, axes: int) -> Layout:
    """The inverse of `format_layout`, for a mesh of `axes` axes."""
    layout = tuple(parse_placement(word) for word in text.split(","))
    if len(layout) != axes:
        raise PlanFormatError(f"layout {text!r} has {len(layout)} placements, the mesh has {axes} axes")
    return layout
