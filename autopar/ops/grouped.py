"""Products of rows in groups, each group with a matrix of its own; where the groups end is data, shapes are not.

`ends` [groups]: group g has the rows from ends[g - 1], or 0, up to ends[g]. The matrices are those of the groups from
`first` on; rows of other groups give zeros, so that a rank with some of the matrices gives its addend of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from autopar.ops.define import differentiate, fake_of, op


def spans(ends: Tensor, first: int, count: int) -> list[tuple[int, int]]:
    """(start, end) of the rows of each of `count` groups."""
    edges = [0, *ends.tolist()][first : first + count + 1]
    return list(pairwise(edges))


def filled(groups: list[tuple[int, int]]) -> Iterator[tuple[int, slice]]:
    """(group, its rows) of those that have rows."""
    return ((group, slice(start, end)) for group, (start, end) in enumerate(groups) if end > start)


def product(rows: Tensor, matrices: Tensor, groups: list[tuple[int, int]], out: Tensor | None = None) -> Tensor:
    """[R, K] times [E, K, N] -> [R, N], in `out` if that is given."""
    out = rows.new_empty((rows.shape[0], matrices.shape[2])) if out is None else out
    start, end = (groups[0][0], groups[-1][1]) if groups else (0, 0)
    out[:start].zero_()
    out[end:].zero_()
    for group, part in filled(groups):
        torch.mm(rows[part], matrices[group], out=out[part])
    return out


def outer_product(left: Tensor, right: Tensor, groups: list[tuple[int, int]], out: Tensor | None = None) -> Tensor:
    """[R, M] and [R, N] -> [E, M, N], summed over the rows of each group, in `out` if that is given."""
    out = left.new_empty((len(groups), left.shape[1], right.shape[1])) if out is None else out
    for group, (start, end) in enumerate(groups):
        torch.mm(left[start:end].t(), right[start:end], out=out[group])  # of no rows: zeros
    return out


def group_sums(rows: Tensor, groups: list[tuple[int, int]]) -> Tensor:
    """[R, N] -> [E, N]."""
    sums = [rows[start:end].sum(0) for start, end in groups]
    return torch.stack(sums) if sums else rows.new_zeros((0, rows.shape[1]))


@op("grouped_mm(Tensor rows, Tensor matrices, Tensor ends, SymInt first) -> Tensor")
def grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor, first: int) -> Tensor:
    """Each row times the matrix of its group."""
    return product(rows, matrices, spans(ends, first, matrices.shape[0]))


@op("grouped_outer(Tensor left, Tensor right, Tensor ends, SymInt first, SymInt count) -> Tensor")
def grouped_outer(left: Tensor, right: Tensor, ends: Tensor, first: int, count: int) -> Tensor:
    """left^T right over the rows of each of `count` groups."""
    return outer_product(left, right, spans(ends, first, count))


@fake_of("grouped_mm")
def _(rows: Tensor, matrices: Tensor, ends: Tensor, first: int) -> Tensor:
    return rows.new_empty((rows.shape[0], matrices.shape[2]))


@fake_of("grouped_outer")
def _(left: Tensor, right: Tensor, ends: Tensor, first: int, count: int) -> Tensor:
    return left.new_empty((count, left.shape[1], right.shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.first = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, matrices, ends = ctx.saved_tensors
    needs_rows, needs_matrices, *_ = ctx.needs_input_grad
    how = (ends, ctx.first)
    grad_rows = torch.ops.autopar.grouped_mm(grad, matrices.transpose(1, 2), *how) if needs_rows else None
    grad_matrices = torch.ops.autopar.grouped_outer(rows, grad, *how, matrices.shape[0]) if needs_matrices else None
    return grad_rows, grad_matrices, None, None


def _save_outer(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    left, right, ends, ctx.first, _ = inputs
    ctx.save_for_backward(left, right, ends)


def _backward_outer(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    left, right, ends = ctx.saved_tensors
    needs_left, needs_right, *_ = ctx.needs_input_grad
    how = (ends, ctx.first)
    grad_left = torch.ops.autopar.grouped_mm(right, grad.transpose(1, 2), *how) if needs_left else None
    grad_right = torch.ops.autopar.grouped_mm(left, grad, *how) if needs_right else None
    return grad_left, grad_right, None, None, None


differentiate("grouped_mm", _backward, _save)
differentiate("grouped_outer", _backward_outer, _save_outer)
