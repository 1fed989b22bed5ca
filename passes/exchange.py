"""Exchanges: intervals of a dim that ranks hold, carried to the ranks that want them by one all-to-all.

All intervals lie on one line, a dim of one tensor. Each rank knows what every rank has and wants, so it sends each rank
just the parts that they share, in the order of the line; what a rank wants of its own stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from math import prod

import torch
from torch import fx

from autopar.passes.local_call import GraphBuilder

aten = torch.ops.aten
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
Interval = tuple[int, int]  # start and end on the line
Intervals = Sequence[Sequence[Interval]]  # by rank, then by tensor


@dataclass(frozen=True, order=True)
class Part:
    """An interval that one tensor has and another wants."""

    start: int
    end: int
    holder: int
    wanter: int

    @property
    def length(self) -> int:
        return self.end - self.start


def shared(have: Sequence[Interval], want: Sequence[Interval]) -> list[Part]:
    """The parts that are on both sides, in the order of the line."""
    pairs = ((i, j, *one, *other) for i, one in enumerate(have) for j, other in enumerate(want))
    parts = (Part(max(a, c), min(b, d), i, j) for i, j, a, b, c, d in pairs)
    return sorted(part for part in parts if part.length > 0)


@dataclass(frozen=True)
class Piece:
    """A part, and the node that holds it whole, or holds it from `offset` on along the dim."""

    part: Part
    node: fx.Node
    offset: int = 0


@dataclass(frozen=True)
class Exchange:
    """One all-to-all over a mesh axis along `dim`; none where every rank has what it wants.

    What several ranks have is added up where it is wanted; what nobody has is zero.
    """

    build: GraphBuilder
    axis: int
    dim: int
    have: Intervals
    want: Intervals

    def run(self, tensors: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """The tensors that this rank wants, from those that it has."""
        wanted = self.want[self._here]
        pieces = [*self._own(tensors), *self._received(tensors)]
        mine = [[piece for piece in pieces if piece.part.wanter == index] for index in range(len(wanted))]
        return tuple(self._assembled(span, own, tensors[0]) for span, own in zip(wanted, mine, strict=True))

    @property
    def _here(self) -> int:
        return self.build.geometry.coordinates[self.axis]

    @property
    def _ranks(self) -> range:
        return range(self.build.geometry.mesh_shape[self.axis])

    def _parts(self, sender: int, receiver: int) -> list[Part]:
        """What one rank sends another."""
        return [] if sender == receiver else shared(self.have[sender], self.want[receiver])

    def _own(self, tensors: Sequence[fx.Node]) -> Iterable[Piece]:
        have = self.have[self._here]
        for part in shared(have, self.want[self._here]):
            yield Piece(part, tensors[part.holder], part.start - have[part.holder][0])

    def _received(self, tensors: Sequence[fx.Node]) -> Iterable[Piece]:
        if not any(self._parts(one, other) for one in self._ranks for other in self._ranks):
            return []
        build, have = self.build, self.have[self._here]
        sent = [self._parts(self._here, rank) for rank in self._ranks]
        coming = [self._parts(rank, self._here) for rank in self._ranks]
        row = prod(self._sizes(tensors[0], 1))
        flat = [
            self._flat(tensors[part.holder], part.start - have[part.holder][0], part.length)
            for parts in sent
            for part in parts
        ]
        packed = build.op(aten.cat.default, flat) if flat else build.op(aten.new_zeros.default, tensors[0], [0])
        counts = [[row * sum(part.length for part in parts) for parts in side] for side in (coming, sent)]
        group = build.geometry.group_names[self.axis]
        received = build.collective(ALL_TO_ALL, packed, (sum(counts[0]),), *counts, group)
        return self._unpacked(received, [part for parts in coming for part in parts], row, tensors[0])

    def _unpacked(self, received: fx.Node, parts: Sequence[Part], row: int, like: fx.Node) -> list[Piece]:
        pieces, at = [], 0
        for part in parts:
            flat = self.build.op(aten.slice.Tensor, received, 0, at, at + row * part.length)
            pieces.append(Piece(part, self.build.op(aten.view.default, flat, self._sizes(like, part.length))))
            at += row * part.length
        return pieces

    def _sizes(self, like: fx.Node, length: int) -> list[int]:
        """The local sizes, with `length` in the dim of the line."""
        return [length if dim == self.dim else size for dim, size in enumerate(like.meta["val"].shape)]

    def _cut(self, tensor: fx.Node, start: int, length: int) -> fx.Node:
        """`length` elements along the dim; the tensor itself where these are all."""
        if length == tensor.meta["val"].shape[self.dim]:
            return tensor
        return self.build.op(aten.slice.Tensor, tensor, self.dim, start, start + length)

    def _flat(self, tensor: fx.Node, start: int, length: int) -> fx.Node:
        cut = self._cut(tensor, start, length)
        whole = self.build.op(aten.clone.default, cut, memory_format=torch.contiguous_format)
        return self.build.op(aten.view.default, whole, [-1])

    def _assembled(self, span: Interval, pieces: Sequence[Piece], like: fx.Node) -> fx.Node:
        """The pieces in the order of the line, added where they meet, with zeros in the gaps."""
        ends = {end for piece in pieces for end in (piece.part.start, piece.part.end)}
        bounds = pairwise(sorted({*span, *ends}) if span[0] < span[1] else span)
        stretches = [self._stretch(start, end, pieces, like) for start, end in bounds]
        if len(stretches) > 1:
            return self.build.op(aten.cat.default, stretches, self.dim)
        if stretches[0].target is not aten.slice.Tensor:
            return stretches[0]
        return self.build.op(aten.clone.default, stretches[0])  # so that what it was cut from can be freed

    def _stretch(self, start: int, end: int, pieces: Sequence[Piece], like: fx.Node) -> fx.Node:
        """The sum of what the pieces that cover [start, end) have there."""
        covering = [
            self._cut(piece.node, piece.offset + start - piece.part.start, end - start)
            for piece in pieces
            if piece.part.start <= start and end <= piece.part.end
        ]
        if not covering:
            return self.build.op(aten.new_zeros.default, like, self._sizes(like, end - start))
        return reduce(lambda left, right: self.build.op(aten.add.Tensor, left, right), covering)
