"""Where replaced random functions get their numbers: the step's seed and one fresh key per op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import autopar.ops  # noqa: F401  (registers torch.ops.autopar)


@dataclass(frozen=True, slots=True)
class Draw:
    """Every method is one random op, over the full shape."""

    seed: Tensor
    draw_key: Callable[[], int]

    def mask(self, shape: Sequence[int], keep: float) -> Tensor:
        """Bools that are true with probability `keep`."""
        mask: Tensor = torch.ops.autopar.random_mask(self.seed, *whole(shape), keep, self.draw_key())
        return mask

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """In [0, 1)."""
        value: Tensor = torch.ops.autopar.random_uniform(self.seed, *whole(shape), self.draw_key(), dtype)
        return value

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Mean 0, variance 1; of a complex dtype, each part has variance 1/2."""
        if dtype.is_complex:
            parts = [self.normal(shape, dtype.to_real()) for _ in range(2)]
            return torch.complex(*parts).mul(0.5**0.5)
        value: Tensor = torch.ops.autopar.random_normal(self.seed, *whole(shape), self.draw_key(), dtype)
        return value

    def integers(self, low: int, high: int, shape: Sequence[int]) -> Tensor:
        """int64 in [low, high)."""
        value: Tensor = torch.ops.autopar.random_integers(self.seed, *whole(shape), low, high, self.draw_key())
        return value


def whole(shape: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """(shape, offset, full shape) of a tensor that is not cut."""
    return list(shape), [0] * len(shape), list(shape)
