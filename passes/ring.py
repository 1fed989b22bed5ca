"""Rings: tensors that go from rank to rank along mesh axes until every rank has had those of all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import fx

from autopar.passes.local_call import GraphBuilder

aten = torch.ops.aten
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default


def turns(mesh_shape: Sequence[int], axes: Sequence[int]) -> list[int]:
    """The axes along which tensors are passed on, one after the other, so that every rank has those of all once.

    Between two turns of an outer axis, the inner ones go around.
    """
    order: list[int] = []
    for axis in reversed(axes):
        order = [*order, *[axis, *order] * (mesh_shape[axis] - 1)]
    return order


def passed_on(
    build: GraphBuilder, tensors: Sequence[fx.Node], axis: int, dim: int, coming: int, steps: int = 1
) -> list[fx.Node]:
    """Give `tensors` to the rank `steps` further along `axis`; get those of the rank `steps` before.

    These have `coming` elements along `dim`, and the same dtype and other sizes. One all-to-all, in which a rank sends
    to one other.
    """
    ranks, here = build.geometry.mesh_shape[axis], build.geometry.coordinates[axis]
    after, before = (here + steps) % ranks, (here - steps) % ranks
    shapes = [_with_length(tensor, dim, coming) for tensor in tensors]
    sizes = [prod(shape) for shape in shapes]
    packed = build.op(aten.cat.default, [_flat(build, tensor) for tensor in tensors])
    counts = [0] * ranks, [0] * ranks
    counts[0][before], counts[1][after] = sum(sizes), packed.meta["val"].shape[0]
    group = build.geometry.group_names[axis]
    received = build.collective(ALL_TO_ALL, packed, (sum(sizes),), *counts, group)
    bounds = pairwise(accumulate(sizes, initial=0))
    parts = [build.op(aten.slice.Tensor, received, 0, start, end) for start, end in bounds]
    return [build.op(aten.view.default, part, shape) for part, shape in zip(parts, shapes, strict=True)]


def _flat(build: GraphBuilder, tensor: fx.Node) -> fx.Node:
    whole = build.op(aten.clone.default, tensor, memory_format=torch.contiguous_format)
    return build.op(aten.view.default, whole, [-1])


def _with_length(tensor: fx.Node, dim: int, length: int) -> list[int]:
    return [length if index == dim else size for index, size in enumerate(tensor.meta["val"].shape)]
