"""Random tensors whose every element is a hash of (seed, key, index in the full tensor).

A shard computes exactly its slice of the full tensor, so results do not depend on the layout, and a recomputed op
replays. `seed` is an int64 scalar tensor, one per step; `key` tells the random ops of a program apart.

The generator is counter-based as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, with
cheaper mixers: (seed, key) goes through the SplitMix64 finalizer (Steele, Lea and Flood, OOPSLA 2014) to two 32-bit
words; each index is mixed with them in two rounds of `triple32` (Wellons, "hash-prospector", 2018: the 32-bit
permutation of least avalanche bias found by search).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ops.define import fake_of, op

CHUNK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 24}  # temporaries stay in a CPU core's cache; few launches on a GPU
DEFAULT_CHUNK_ELEMENTS = 1 << 20

SIZES = "Tensor seed, SymInt[] shape, SymInt[] offset, SymInt[] full_shape"


def signed(value: int, bits: int) -> int:
    """The two's-complement reading of the lowest `bits` of `value`."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def shifted(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of a signed integer tensor."""
    width = value.dtype.itemsize * 8
    return (value >> bits).bitwise_and_((1 << (width - bits)) - 1)


def key_words(seed: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Two int32 scalars: the SplitMix64 finalizer of seed + key * golden ratio."""
    state = seed + signed((key + 1) * 0x9E3779B97F4A7C15, 64)
    state = (state ^ shifted(state, 30)) * signed(0xBF58476D1CE4E5B9, 64)
    state = (state ^ shifted(state, 27)) * signed(0x94D049BB133111EB, 64)
    state = state ^ shifted(state, 31)
    return state.to(torch.int32), (state >> 32).to(torch.int32)


def triple32_(value: Tensor) -> Tensor:
    """Mix an int32 tensor in place."""
    value.bitwise_xor_(shifted(value, 17)).mul_(signed(0xED5AD4BB, 32))
    value.bitwise_xor_(shifted(value, 11)).mul_(signed(0xAC4C1B51, 32))
    value.bitwise_xor_(shifted(value, 15)).mul_(signed(0x31848BAB, 32))
    return value.bitwise_xor_(shifted(value, 14))


@dataclass(frozen=True, slots=True)
class Index:
    """Positions in a flat full tensor as int32 words; `high` is None where 32 bits are enough."""

    low: Tensor
    high: Tensor | None


Values = Callable[[Index], Tensor]


def random_words(index: Index, words: tuple[Tensor, Tensor]) -> Tensor:
    """32 random bits per index, as int32."""
    mixed = triple32_(index.low ^ words[0])
    if index.high is not None:
        mixed.bitwise_xor_(index.high * signed(0x9E3779B1, 32))
    return triple32_(mixed.add_(words[1]))


def index_chunks(
    shape: Sequence[int], offset: Sequence[int], full_shape: Sequence[int], device: torch.device
) -> Iterator[tuple[int, int, Index]]:
    """(start, stop, positions in the full tensor) of consecutive chunks of a slice, flattened."""
    count, wide = math.prod(shape), math.prod(full_shape) > 1 << 32
    step = CHUNK_ELEMENTS.get(device.type, DEFAULT_CHUNK_ELEMENTS)
    strides = [math.prod(full_shape[dim + 1 :]) for dim in range(len(full_shape))]
    base = sum(start * stride for start, stride in zip(offset, strides, strict=True))
    blocks = _contiguous_blocks(shape, full_shape, strides)
    for start in range(0, count, step):
        stop = min(count, start + step)
        position = torch.arange(start, stop, device=device)
        position = _global_index(position, blocks).add_(base)
        yield start, stop, Index(position.to(torch.int32), (position >> 32).to(torch.int32) if wide else None)


def _contiguous_blocks(
    shape: Sequence[int], full_shape: Sequence[int], strides: Sequence[int]
) -> list[tuple[int, int]]:
    """(size, stride in the full tensor) of the slice's dims, outermost first, merged where they are contiguous."""
    blocks: list[tuple[int, int]] = []
    for dim in reversed(range(len(shape))):
        whole = dim + 1 < len(shape) and shape[dim + 1] == full_shape[dim + 1]
        if blocks and whole:
            size, stride = blocks.pop()
            blocks.append((size * shape[dim], stride))
        else:
            blocks.append((shape[dim], strides[dim]))
    return blocks[::-1]


def _global_index(position: Tensor, blocks: Sequence[tuple[int, int]]) -> Tensor:
    if len(blocks) <= 1:
        return position
    index = torch.zeros_like(position)
    for size, stride in reversed(blocks[1:]):
        index.add_(position.remainder(size), alpha=stride)
        position = position.div(size, rounding_mode="floor")
    return index.add_(position, alpha=blocks[0][1])


def fill(
    seed: Tensor, sizes: tuple[Sequence[int], Sequence[int], Sequence[int]], dtype: torch.dtype, values: Values
) -> Tensor:
    """A tensor of `sizes` (shape, offset, full shape) filled chunk by chunk with `values(positions)`."""
    out = torch.empty(tuple(sizes[0]), dtype=dtype, device=seed.device)
    flat = out.view(-1)
    for start, stop, index in index_chunks(*sizes, seed.device):
        flat[start:stop] = values(index)
    return out


def uniform_values(seed: Tensor, key: int, stream: int, bits: int) -> Values:
    """float64 multiples of 2**-bits in [0, 1); the streams of one key are independent. At most 53 bits."""
    words = [key_words(seed, 4 * key + 2 * stream + part) for part in range(2)]

    def values(index: Index) -> Tensor:
        if bits <= 32:
            return shifted_or_same(random_words(index, words[0]), 32 - bits).double().mul_(2.0**-bits)
        high = shifted(random_words(index, words[0]), 32 - bits // 2).double()
        low = shifted(random_words(index, words[1]), 32 - (bits - bits // 2)).double()
        return high.mul_(2.0 ** (bits - bits // 2)).add_(low).mul_(2.0**-bits)

    return values


def shifted_or_same(value: Tensor, bits: int) -> Tensor:
    """`shifted`, as int64 where no bit is dropped (an int32 would read as negative)."""
    return shifted(value, bits) if bits else value.long().bitwise_and_(0xFFFFFFFF)


def significand_bits(dtype: torch.dtype) -> int:
    """Bits of a float's significand, the hidden one included: a multiple of 2**-bits below 1 is exact."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


@op(f"random_mask({SIZES}, float keep, int key) -> Tensor")
def random_mask(
    seed: Tensor, shape: Sequence[int], offset: Sequence[int], full_shape: Sequence[int], keep: float, key: int
) -> Tensor:
    """True with probability `keep`: elements [offset, offset + shape) of the mask of `full_shape`."""
    threshold = round(keep * 2**32)
    if not 0 < threshold < 2**32:
        return torch.full(tuple(shape), threshold > 0, dtype=torch.bool, device=seed.device)
    words = key_words(seed, 4 * key)

    def values(index: Index) -> Tensor:
        return random_words(index, words) < threshold - 2**31

    return fill(seed, (shape, offset, full_shape), torch.bool, values)


@op(f"random_uniform({SIZES}, int key, ScalarType dtype) -> Tensor")
def random_uniform(
    seed: Tensor,
    shape: Sequence[int],
    offset: Sequence[int],
    full_shape: Sequence[int],
    key: int,
    dtype: torch.dtype,
) -> Tensor:
    """Uniform in [0, 1), in multiples of half the dtype's epsilon."""
    values = uniform_values(seed, key, 0, significand_bits(dtype))
    return fill(seed, (shape, offset, full_shape), dtype, values)


@op(f"random_normal({SIZES}, int key, ScalarType dtype) -> Tensor")
def random_normal(
    seed: Tensor,
    shape: Sequence[int],
    offset: Sequence[int],
    full_shape: Sequence[int],
    key: int,
    dtype: torch.dtype,
) -> Tensor:
    """Standard normal, by Box and Muller (1958) in float64: rounding hides how a device's log and cos differ."""
    radius = uniform_values(seed, key, 0, 53)
    angle = uniform_values(seed, key, 1, 32)

    def values(index: Index) -> Tensor:
        length = radius(index).neg_().log1p_().mul_(-2.0).sqrt_()
        return angle(index).mul_(2 * math.pi).cos_().mul_(length)

    return fill(seed, (shape, offset, full_shape), dtype, values)


@op(f"random_integers({SIZES}, int low, int high, int key) -> Tensor")
def random_integers(
    seed: Tensor,
    shape: Sequence[int],
    offset: Sequence[int],
    full_shape: Sequence[int],
    low: int,
    high: int,
    key: int,
) -> Tensor:
    """int64, uniform in [low, high): floor of a 53-bit uniform times the width."""
    uniform = uniform_values(seed, key, 0, 53)

    def values(index: Index) -> Tensor:
        return uniform(index).mul_(high - low).floor_().long().clamp_(max=high - low - 1).add_(low)

    return fill(seed, (shape, offset, full_shape), torch.int64, values)


@fake_of("random_mask")
def _(seed: Tensor, shape: Sequence[int], *_: object) -> Tensor:
    return seed.new_empty(tuple(shape), dtype=torch.bool)


@fake_of("random_uniform", "random_normal")
def _(seed: Tensor, shape: Sequence[int], offset: object, full_shape: object, key: int, dtype: torch.dtype) -> Tensor:
    return seed.new_empty(tuple(shape), dtype=dtype)


@fake_of("random_integers")
def _(seed: Tensor, shape: Sequence[int], *_: object) -> Tensor:
    return seed.new_empty(tuple(shape))
