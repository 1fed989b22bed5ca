"""Gather, scatter and advanced indexing: bystander dims and index dims may be sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import Any

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.sharding.layout import REPLICATE
from autopar.sharding.op_call import OpCall, TensorSpec
from autopar.sharding.rule import Rule
from autopar.sharding.rules.placing import (
    SUM,
    RuleTable,
    long_dims,
    place,
    required_tensor_at,
    result,
    summable,
    tensor_at,
    wrap_dim,
)

PICKED = "picked"  # the dim that is looked up is sharded; an index outside a rank's range finds zeros there


def gather(call: OpCall) -> Iterator[Rule]:
    """(self, dim, index)."""
    source, index = required_tensor_at(call, 0), required_tensor_at(call, 2)
    rank = len(source.shape)
    if not rank or len(index.shape) != rank:
        return
    looked_up = wrap_dim(call.args[1], rank)
    for dim in long_dims(index):
        if dim == looked_up:
            yield place(call, {2: Shard(dim)}, Shard(dim))
        elif source.shape[dim] == index.shape[dim]:
            yield place(call, {0: Shard(dim), 2: Shard(dim)}, Shard(dim))
    if summable(result(call)):
        yield place(call, {0: SUM}, SUM)
        yield place(call, {0: Shard(looked_up)}, SUM, form=PICKED)


def scatter(call: OpCall) -> Iterator[Rule]:
    """(self, dim, index, src or value): the dims that are not written along."""
    target, index = required_tensor_at(call, 0), required_tensor_at(call, 2)
    rank = len(target.shape)
    if not rank or len(index.shape) != rank:
        return
    written, src = wrap_dim(call.args[1], rank), tensor_at(call, 3)
    for dim in long_dims(target):
        same = index.shape[dim] == target.shape[dim] and (
            src is None or not src.shape or src.shape[dim] == target.shape[dim]
        )
        if dim != written and same:
            source: dict[Any, Placement] = {} if src is None or not src.shape else {3: Shard(dim)}
            yield place(call, {0: Shard(dim), 2: Shard(dim), **source}, Shard(dim))


def scatter_source(call: OpCall) -> Iterator[Rule]:
    """`scatter.src` is linear in both operands."""
    yield from scatter(call)
    if summable(result(call)):
        yield place(call, {0: SUM, 3: SUM}, SUM)


def scatter_add(call: OpCall) -> Iterator[Rule]:
    """As `scatter.src`; what is added may also be spread along the dim that is written along."""
    yield from scatter_source(call)
    index, src = required_tensor_at(call, 2), required_tensor_at(call, 3)
    if not index.shape or not summable(result(call)):
        return
    written = wrap_dim(call.args[1], len(index.shape))
    if len(index.shape) == len(src.shape) and index.shape[written] == src.shape[written]:
        yield place(call, {0: SUM, 2: Shard(written), 3: Shard(written)}, SUM)


def index_select(call: OpCall) -> Iterator[Rule]:
    """(self, dim, index)."""
    source, index = required_tensor_at(call, 0), required_tensor_at(call, 2)
    if not source.shape:
        return
    picked = wrap_dim(call.args[1], len(source.shape))
    for dim in long_dims(source):
        if dim != picked:
            yield place(call, {0: Shard(dim)}, Shard(dim))
    if index.shape:
        yield place(call, {2: Shard(0)}, Shard(picked))
    if summable(result(call)):
        yield place(call, {0: SUM}, SUM)
        yield place(call, {0: Shard(picked)}, SUM, form=PICKED)


def index_add(call: OpCall) -> Iterator[Rule]:
    """(self, dim, index, source, alpha)."""
    target, index = required_tensor_at(call, 0), required_tensor_at(call, 2)
    if not target.shape or len(required_tensor_at(call, 3).shape) != len(target.shape):
        return
    written = wrap_dim(call.args[1], len(target.shape))
    for dim in long_dims(target):
        if dim != written:
            yield place(call, {0: Shard(dim), 3: Shard(dim)}, Shard(dim))
    if summable(result(call)):
        yield place(call, {0: SUM, 3: SUM}, SUM)
        if index.shape:
            yield place(call, {0: SUM, 2: Shard(0), 3: Shard(written)}, SUM)


def index_fill(call: OpCall) -> Iterator[Rule]:
    """`index_fill(self, dim, index, value)`, `index_copy(self, dim, index, source)`: the other dims."""
    target, source = required_tensor_at(call, 0), tensor_at(call, 3)
    if not target.shape:
        return
    written = wrap_dim(call.args[1], len(target.shape))
    for dim in long_dims(target):
        if dim != written:
            own: dict[Any, Placement] = {3: Shard(dim)} if source is not None and source.shape else {}
            yield place(call, {0: Shard(dim), **own}, Shard(dim))


def take(call: OpCall) -> Iterator[Rule]:
    """(self, index): the flattened tensor is looked up."""
    for dim in long_dims(required_tensor_at(call, 1)):
        yield place(call, {1: Shard(dim)}, Shard(dim))
    if summable(result(call)):
        yield place(call, {0: SUM}, SUM)


class Indexed:
    """The geometry of advanced indexing: where the dims of `self[indices]` come from."""

    def __init__(self, source: TensorSpec, indices: tuple[TensorSpec | None, ...]) -> None:
        self.rank = len(source.shape)
        self.positions = tuple(dim for dim, index in enumerate(indices) if index is not None)
        self.indices = tuple(index for index in indices if index is not None)
        self.shape = _broadcast(index.shape for index in self.indices)
        adjacent = self.positions == tuple(range(self.positions[0], self.positions[-1] + 1))
        self.first = self.positions[0] if adjacent else 0  # where the dims of the indices stand in the result

    def bystanders(self) -> Iterator[tuple[int, int]]:
        """(dim of self, dim of the result) of the dims that are not indexed."""
        kept = [dim for dim in range(self.rank) if dim not in self.positions]
        for position, dim in enumerate(kept):
            yield dim, position + (len(self.shape) if position >= self.first else 0)

    def index_placements(self, dim: int) -> tuple[Placement, ...]:
        """Placements of the index tensors when dim `dim` of their broadcast is cut."""
        offsets = [dim - (len(self.shape) - len(index.shape)) for index in self.indices]
        return tuple(
            Shard(own) if own >= 0 and index.shape[own] == self.shape[dim] else REPLICATE
            for own, index in zip(offsets, self.indices, strict=True)
        )


def _broadcast(shapes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    sizes = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return tuple(reversed([next((size for size in row if size != 1), 1) for row in sizes]))


def indexed(call: OpCall) -> Indexed | None:
    """The geometry of `index` or `index_put`; None for masks, whose result has a shape that depends on data."""
    indices = call.args[1]
    tensors = [index for index in indices if index is not None]
    if not tensors or any(str(index.dtype) in ("torch.bool", "torch.uint8") for index in tensors):
        return None
    return Indexed(required_tensor_at(call, 0), indices)


def index(call: OpCall) -> Iterator[Rule]:
    """(self, indices)."""
    geometry = indexed(call)
    if geometry is None:
        return
    for dim, target in geometry.bystanders():
        yield place(call, {0: Shard(dim)}, Shard(target))
    for dim in range(len(geometry.shape)):
        if geometry.shape[dim] > 1:
            yield Rule((REPLICATE, *geometry.index_placements(dim)), (Shard(geometry.first + dim),))
    if summable(result(call)):
        yield place(call, {0: SUM}, SUM)
        if len(geometry.indices) == 1:
            yield place(call, {0: Shard(geometry.positions[0])}, SUM, form=PICKED)


def index_put(call: OpCall) -> Iterator[Rule]:
    """(self, indices, values, accumulate): bystander dims; accumulation is linear."""
    geometry, values = indexed(call), required_tensor_at(call, 2)
    if geometry is None or len(values.shape) != geometry.rank - len(geometry.positions) + len(geometry.shape):
        return
    for dim, target in geometry.bystanders():
        if values.shape[target] == required_tensor_at(call, 0).shape[dim]:
            yield place(call, {0: Shard(dim), 2: Shard(target)}, Shard(dim))
    if not call.argument(3, "accumulate", False) or not summable(result(call)):
        return
    yield place(call, {0: SUM, 2: SUM}, SUM)
    for dim in range(len(geometry.shape)):
        target = geometry.first + dim
        if 1 < geometry.shape[dim] == values.shape[target]:
            yield Rule((SUM, *geometry.index_placements(dim), Shard(target)), (SUM,))


_SCATTERS: dict[str, Callable[[OpCall], Iterator[Rule]]] = {
    "aten.scatter.value": scatter,
    "aten.scatter.src": scatter_source,
    "aten.scatter.reduce": scatter,
    "aten.scatter.value_reduce": scatter,
    "aten.scatter_reduce.two": scatter,
    "aten.scatter_add.default": scatter_add,
}
RULES: RuleTable = {
    **_SCATTERS,
    "aten.gather.default": gather,
    "aten.index_select.default": index_select,
    "aten.index_add.default": index_add,
    "aten.index_fill.int_Scalar": index_fill,
    "aten.index_copy.default": index_fill,
    "aten.index_fill.int_Tensor": index_fill,
    "aten.index_reduce.default": index_fill,
    "aten.take.default": take,
    "aten.index.Tensor": index,
    "aten._unsafe_index.Tensor": index,
    "aten.index_put.default": index_put,
    "aten._unsafe_index_put.default": index_put,
}
