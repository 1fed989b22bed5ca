"""Values for trials, of several kinds: an op may look local on one kind of values and not be so on another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Generator, Tensor

from autopar.sharding.discovery.scaling import Problem
from autopar.sharding.op_call import TensorSpec

Shape = tuple[int, ...]
FEW = 0.03  # the fraction of values that are apart from the others, beside the one that always is
POOL = 1 << 15  # values of each kind that are drawn once; trials take windows of them
STEP = 7919  # prime: from the window of one draw to that of the next
APART: Mapping[str, float] = {"outliers": 1e4, "gaps": math.nan}


def normal(shape: Shape, generator: Generator) -> Tensor:
    """Of mean zero and variance one."""
    return torch.randn(shape, generator=generator).double()


def unit(shape: Shape, generator: Generator) -> Tensor:
    """Between zero and one: what logarithms, roots and probabilities need."""
    return torch.rand(shape, generator=generator).double()


def outliers(shape: Shape, generator: Generator) -> Tensor:
    """Small values and few huge ones: an op that looks at all of them sees what a shard does not have."""
    huge = normal(shape, generator) * 1e4
    return torch.where(unit(shape, generator) < FEW, huge, normal(shape, generator) * 1e-2)


def ties(shape: Shape, generator: Generator) -> Tensor:
    """Small whole numbers, so that many are equal and some are zero."""
    return torch.randint(-2, 3, shape, generator=generator).double()


def wide(shape: Shape, generator: Generator) -> Tensor:
    """Beyond every threshold and clip."""
    return normal(shape, generator) * 1e5


def tiny(shape: Shape, generator: Generator) -> Tensor:
    """Below every threshold."""
    return normal(shape, generator) * 1e-3


def gaps(shape: Shape, generator: Generator) -> Tensor:
    """Few values are no numbers."""
    return normal(shape, generator).masked_fill(unit(shape, generator) < FEW, torch.nan)


REAL_KINDS: Mapping[str, Callable[[Shape, Generator], Tensor]] = {
    "normal": normal,
    "outliers": outliers,
    "unit": unit,
    "ties": ties,
    "wide": wide,
    "tiny": tiny,
    "gaps": gaps,
}
INTEGER_KINDS = ("below the smallest size", "binary", "any", "below the largest size")


@dataclass(frozen=True)
class Kind:
    """How the values of one trial are drawn; each name is one of the two tables above."""

    real: str
    integer: str


def draw(problem: Problem, kind: Kind, seed: int) -> list[Tensor]:
    """One tensor per tensor input, the same for the same seed."""
    sizes = [size for spec in problem.inputs for size in spec.shape if size > 1] or [2]
    bounds = {
        "below the smallest size": (0, min(sizes)),
        "binary": (0, 2),
        "any": (-9, 60),
        "below the largest size": (0, max(sizes)),
    }[kind.integer]
    drawn = [_values(spec, kind.real, bounds, 64 * seed + 2 * index) for index, spec in enumerate(problem.inputs)]
    if problem.device == "cpu":
        return drawn
    return [tensor.to(problem.device, memory_format=torch.contiguous_format) for tensor in drawn]


def _values(spec: TensorSpec, real: str, bounds: tuple[int, int], seed: int) -> Tensor:
    dtype, shape = spec.dtype, spec.shape
    if dtype.is_complex:
        return torch.complex(_reals(real, shape, seed), _reals(real, shape, seed + 1)).to(dtype)
    if dtype.is_floating_point:
        return _reals(real, shape, seed).to(dtype)
    numbers = _window("integers", shape, seed)
    if dtype is torch.bool:
        return numbers % 2 == 1
    low = bounds[0] if dtype.is_signed else max(0, bounds[0])
    return (numbers % (bounds[1] - low) + low).to(dtype)


def _reals(kind: str, shape: Shape, seed: int) -> Tensor:
    """A new tensor; where some values are to be apart, one is for certain."""
    values = _window(kind, shape, seed).clone()
    if kind in APART and values.numel():
        values.view(-1)[STEP * seed % values.numel()] = APART[kind]
    return values


def _window(kind: str, shape: Shape, seed: int) -> Tensor:
    """Values of the pool of a kind, from a place that the seed tells."""
    numel = math.prod(shape)
    size = POOL
    while size < 2 * numel:
        size *= 2
    start = STEP * seed % (size - numel)
    return _pool(kind, size)[start : start + numel].view(shape)


@cache
def _pool(kind: str, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(kind))
    if kind == "integers":
        return torch.randint(0, 1 << 40, (size,), generator=generator)
    return REAL_KINDS[kind]((size,), generator)
