"""Halos: chunks of windowed dims made the inputs of a local call, and gradients of such inputs made those of chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.passes.exchange import Exchange, Intervals
from autopar.passes.local_call import GraphBuilder, LocalCall
from autopar.sharding.layout import chunk, shard_dim
from autopar.sharding.windows import Frame, Window, frame_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Cut:
    """A dim over which the op slides a window, cut by one axis."""

    axis: int
    dim: int
    window: Window
    ranks: int
    rank: int

    @property
    def frame(self) -> Frame:
        """What this rank calls the op on."""
        return frame_of(self.window, self.ranks, self.rank)

    @property
    def results(self) -> tuple[int, int]:
        """(offset, length) of this rank's results."""
        return chunk(self.window.results, self.ranks, self.rank)

    @property
    def chunks(self) -> Intervals:
        """What every rank holds of the input."""
        spans = (chunk(self.window.size, self.ranks, rank) for rank in range(self.ranks))
        return [[(start, start + length)] for start, length in spans]

    @property
    def frames(self) -> Intervals:
        """What every rank calls the op on."""
        frames = (frame_of(self.window, self.ranks, rank) for rank in range(self.ranks))
        return [[(frame.start, frame.stop)] for frame in frames]


class Halos:
    """The cuts of one local call; where there are none, every method gives back what it is given."""

    def __init__(self, local: LocalCall) -> None:
        self.build: GraphBuilder = local.build
        self.cuts = tuple(_cuts(local))

    def __bool__(self) -> bool:
        return bool(self.cuts)

    def fetched(self, source: fx.Node) -> fx.Node:
        """The inputs of the call, from this rank's chunk: dim after dim, so that corners come with the later dims."""
        for cut in self.cuts:
            exchange = Exchange(self.build, cut.axis, cut.dim, cut.chunks, cut.frames)
            (source,) = exchange.run([source])
        return source

    def returned(self, grad: fx.Node) -> fx.Node:
        """The gradient of this rank's chunk, from those of all ranks' inputs of the call: the reverse of `fetched`."""
        for cut in reversed(self.cuts):
            exchange = Exchange(self.build, cut.axis, cut.dim, cut.frames, cut.chunks)
            (grad,) = exchange.run([grad])
        return grad

    def kept(self, out: fx.Node) -> fx.Node:
        """This rank's results, from all those of the call."""
        for cut in self.cuts:
            skip, length = cut.frame.skip, cut.results[1]
            if length != cut.frame.outputs:
                out = self.build.op(aten.slice.Tensor, out, cut.dim, skip, skip + length)
        return out

    def widened(self, grad: fx.Node) -> fx.Node:
        """The gradient of all results of the call, zero for those that are not this rank's: the reverse of `kept`."""
        padding = [0, 0] * grad.meta["val"].dim()
        for cut in self.cuts:
            skip, length = cut.frame.skip, cut.results[1]
            at = 2 * (grad.meta["val"].dim() - 1 - cut.dim)
            padding[at : at + 2] = [skip, cut.frame.outputs - skip - length]
        return self.build.op(aten.constant_pad_nd.default, grad, padding) if any(padding) else grad

    def blank(self, source: fx.Node) -> fx.Node:
        """A tensor of the size of the inputs of the call, for a backward that reads no more than that."""
        if not self.cuts:
            return source
        sizes = self.input_sizes(source.meta["val"].shape)
        return self.build.op(aten.new_empty.default, source, sizes)

    def input_sizes(self, sizes: Sequence[int]) -> list[int]:
        """The sizes of the inputs of the call, from those of a chunk."""
        return self._replaced(sizes, {cut.dim: cut.frame.stop - cut.frame.start for cut in self.cuts})

    def output_sizes(self, sizes: Sequence[int]) -> list[int]:
        """The sizes of the results of the call, from those of the rank's."""
        return self._replaced(sizes, {cut.dim: cut.frame.outputs for cut in self.cuts})

    @staticmethod
    def _replaced(sizes: Sequence[int], new: dict[int, int]) -> list[int]:
        return [new.get(dim, size) for dim, size in enumerate(sizes)]


def _cuts(local: LocalCall) -> Iterator[Cut]:
    geometry = local.geometry
    for axis, rule in enumerate(local.strategy.rules):
        if rule.halo is not None:
            dim = shard_dim(rule.outputs[0])
            assert dim is not None
            yield Cut(axis, dim, rule.halo.window, geometry.mesh_shape[axis], geometry.coordinates[axis])
