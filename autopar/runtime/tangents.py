"""The gradients that arrive at a program's outputs where nobody gives any."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.capture.program import InputKind, Program


def varied_tangents(program: Program) -> dict[str, Tensor]:
    """By the name of each differentiated output, a gradient that differs from element to element; 1 for a scalar.

    With ones, whatever leaves the sum of an output (or of two) as it is would have no gradient: softmax, normalization.
    """
    values = {name: node.meta["val"] for name, node in program.named_inputs(InputKind.TANGENT).items()}
    return {name: _varied(value.shape, value.dtype, number) for number, (name, value) in enumerate(values.items())}


def _varied(shape: Sequence[int], dtype: torch.dtype, number: int) -> Tensor:
    """cos of each element's place in the tensor, shifted by `number`; of a complex dtype, + i times the sine."""
    if not shape:
        return torch.ones((), dtype=dtype)
    angle = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(tuple(shape)) + number
    value = torch.polar(torch.ones_like(angle), angle) if dtype.is_complex else angle.cos()
    return value.to(dtype)
