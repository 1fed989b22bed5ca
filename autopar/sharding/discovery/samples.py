"""Values for trials, of several kinds: an op may look local on one kind of values and not be so on another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from autopar.sharding.discovery.scaling import Problem
from autopar.sharding.op_call import TensorSpec

Shape = tuple[int, ...]


def normal(shape: Shape, generator: Generator) -> Tensor:
    """Of mean zero and variance one."""
    return torch.randn(shape, generator=generator).double()


def unit(shape: Shape, generator: Generator) -> Tensor:
    """Between zero and one: what logarithms, roots and probabilities need."""
    return torch.rand(shape, generator=generator).double()


def outliers(shape: Shape, generator: Generator) -> Tensor:
    """Small values, and huge ones in few places: an op that looks at all of them sees what a shard does not have."""
    huge = normal(shape, generator) * 1e4
    return torch.where(unit(shape, generator) < 0.1, huge, normal(shape, generator) * 1e-2)


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
    """Some values are no numbers."""
    return normal(shape, generator).masked_fill(unit(shape, generator) < 0.05, torch.nan)


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
    generator = torch.Generator().manual_seed(seed)
    sizes = [size for spec in problem.inputs for size in spec.shape if size > 1] or [2]
    bounds = {
        "below the smallest size": (0, min(sizes)),
        "binary": (0, 2),
        "any": (-9, 60),
        "below the largest size": (0, max(sizes)),
    }
    return [
        _values(spec, kind.real, bounds[kind.integer], generator).to(
            problem.device, memory_format=torch.contiguous_format
        )
        for spec in problem.inputs
    ]


def _values(spec: TensorSpec, real: str, bounds: tuple[int, int], generator: Generator) -> Tensor:
    dtype, shape = spec.dtype, spec.shape
    if dtype.is_complex:
        pair = [REAL_KINDS[real](shape, generator) for _ in range(2)]
        return torch.complex(*pair).to(dtype)
    if dtype.is_floating_point:
        return REAL_KINDS[real](shape, generator).to(dtype)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    low = bounds[0] if dtype.is_signed else max(0, bounds[0])
    return torch.randint(low, bounds[1], shape, generator=generator).to(dtype)
