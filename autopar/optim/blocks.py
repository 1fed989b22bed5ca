"""Block-wise 8-bit quantization: codes of a dynamic map, scaled by the largest magnitude of each block of the whole.

A block is `BLOCK` elements that follow one another in the flattened full tensor, whatever part of it a rank holds: so
a shard is quantized to the codes that the whole would have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from autopar.optim.cut import Cut
from autopar.sharding.layout import REPLICATE, Layout, local_chunk, shard_dim

BLOCK = 2048  # elements, as in the source below
_DECADES = 7


@lru_cache(maxsize=8)
def dynamic_map(*, signed: bool) -> Tensor:
    """The 256 values of the dynamic data type, ascending, from -1 (0 if unsigned) to 1.

    The number of leading zero bits is a decimal exponent; the bits that are left divide the decade from 0.1 to 1
    evenly, and a code stands for the middle of its part. A signed code spends one bit on its sign.

    Source: Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR 2022,
    section 1.3, with the map of its published implementation: 0 and 1 are exact.
    """
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        parts = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1.0, parts + 1, dtype=torch.float64)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - _DECADES + 1)).tolist()
        values += middles + ([-value for value in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)


@lru_cache(maxsize=8)
def _borders(*, signed: bool) -> Tensor:
    """The 255 values halfway between neighbours of the map."""
    values = dynamic_map(signed=signed)
    return (values[:-1] + values[1:]) / 2


@lru_cache(maxsize=4096)
def blocks_align(shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...], block: int = BLOCK) -> bool:
    """Whether every rank's shard is whole blocks, and those that the same cut of the list of blocks would give it.

    Then each rank keeps the scales of its own blocks; else all ranks keep all scales.
    """
    if any(shard_dim(placement) not in (None, 0) for placement in layout):
        return False
    row = math.prod(shape[1:])
    blocks = -(-math.prod(shape) // block)
    for coordinates in product(*map(range, mesh_shape)):
        (start, *_), (rows, *_) = local_chunk(shape, layout, mesh_shape, coordinates) if shape else ((0,), (1,))
        (first,), (count,) = local_chunk((blocks,), layout, mesh_shape, coordinates)
        end = min((first + count) * block, math.prod(shape))
        if rows and (start * row, (start + rows) * row) != (first * block, end):
            return False
        if not rows and count:
            return False
    return True


@dataclass(frozen=True)
class Blocks:
    """The blocks of a parameter that is cut over a mesh."""

    cut: Cut
    block: int = BLOCK

    @property
    def count(self) -> int:
        """Of the full tensor."""
        return -(-math.prod(self.cut.shape) // self.block)

    @property
    def align(self) -> bool:
        mesh_shape = tuple(self.cut.mesh.shape) if self.cut.mesh is not None else ()
        return blocks_align(self.cut.shape, self.cut.layout, mesh_shape, self.block)

    @property
    def scales_cut(self) -> Cut:
        """How the scales of the blocks are cut."""
        layout = self.cut.layout if self.align else (REPLICATE,) * len(self.cut.layout)
        return Cut((self.count,), self.cut.mesh, layout)

    def members(self, device: torch.device) -> Tensor:
        """For every element of this rank's shard, flattened, the index of its block among the scales it keeps."""
        offsets, lengths = self.cut.own
        index = torch.zeros((), dtype=torch.int64, device=device)
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            place = torch.arange(offset, offset + length, device=device) * math.prod(self.cut.shape[dim + 1 :])
            index = index.unsqueeze(-1) + place
        return index.reshape(-1) // self.block - self.scales_cut.own[0][0]

    def maxima(self, values: Tensor, members: Tensor) -> Tensor:
        """The largest magnitude of each block of which this rank keeps the scale, 0 where it holds nothing of it."""
        found = torch.zeros(self.scales_cut.own[1], dtype=torch.float32, device=values.device)
        return found.scatter_reduce_(0, members, values.abs().reshape(-1), "amax")


def quantized(values: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The nearest code of every value; `scales`: of each value's block."""
    scaled = torch.where(scales > 0, values / scales, torch.zeros_like(values))
    return torch.bucketize(scaled, _borders(signed=signed).to(values.device), out_int32=True).to(torch.uint8)


def dequantized(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The values that codes stand for."""
    return dynamic_map(signed=signed).to(codes.device)[codes.to(torch.int64)] * scales
