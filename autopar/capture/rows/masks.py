"""What is known of masks that say which tokens go to which expert: `index == expert`, `one_hot(index)[expert]`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar.sharding.op_call import first_input

aten = torch.ops.aten
KnownValue = Callable[[fx.Node], Tensor | None]

SAME = frozenset((aten._to_copy.default, aten.alias.default, aten.clone.default, aten.detach.default))
ABOVE_ZERO = frozenset((aten.ne.Scalar, aten.gt.Scalar))
COMPARISONS = frozenset(
    getattr(getattr(aten, name), kind) for name in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Scalar", "Tensor")
)
RESHAPES = frozenset(
    (aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.t.default, aten.expand.default)
)
NEGATIONS = frozenset((aten.bitwise_not.default, aten.logical_not.default))
PARTS = frozenset((aten.select.int, aten.slice.Tensor, aten.unsqueeze.default, aten.squeeze.dim))
CLASS, ONE = -1, -2  # in the place of a dim of the index: the dim of the classes; a dim of size one


@dataclass(frozen=True)
class Labels:
    """Elements that are nonzero only where `index`, with its dims in the order `dims`, is their class.

    `classes`: how many there are along the dim CLASS; `label`: the class of all, where there is no such dim. `table`:
    (node, position) of the tensor with a dim of classes that it was taken from. `is_exact`: nonzero wherever so.
    """

    index: fx.Node
    dims: tuple[int, ...]
    classes: int = 0
    label: int | None = None
    table: tuple[fx.Node, int] | None = None
    is_exact: bool = True


class Masks:
    """Reads masks back to the index that they were made of.

    `known` gives values of nodes that follow from constants; `is_written` tells of memory that was written to since.
    """

    def __init__(self, known: KnownValue, is_written: Callable[[fx.Node], bool]) -> None:
        self._known, self.is_written = known, is_written

    def labels(self, node: fx.Node) -> Labels | None:
        """None where the mask is of no known form."""
        if node.op != "call_function" or self.is_written(node):
            return None
        args: tuple[Any, ...] = node.args
        if node.target in SAME or (node.target in ABOVE_ZERO and args[1] == 0):
            return self.labels(args[0])
        if node.target in (aten.eq.Scalar, aten.eq.Tensor):
            return self._compared(node)
        if node.target in (aten.mul.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default):
            return self._product(node)
        found = self.labels(args[0]) if args and isinstance(args[0], fx.Node) else None
        return None if found is None else self._turned(node, found)

    def _compared(self, node: fx.Node) -> Labels | None:
        index, other = node.args
        assert isinstance(index, fx.Node)
        rank = index.meta["val"].dim()
        if isinstance(other, int):
            return Labels(index, tuple(range(rank)), label=other)
        if not isinstance(other, fx.Node):
            return None
        values = self._known(other)
        if values is None or index.target is not aten.unsqueeze.default or index.args[1] not in (-1, rank - 1):
            return None
        if not torch.equal(values, torch.arange(values.numel())):
            return None
        inner = index.args[0]
        assert isinstance(inner, fx.Node)
        return Labels(inner, (*range(rank - 1), CLASS), classes=values.numel())

    def _product(self, node: fx.Node) -> Labels | None:
        for factor in node.args:
            if isinstance(factor, fx.Node) and factor.meta["val"].shape == node.meta["val"].shape:
                found = self.labels(factor)
                if found is not None:
                    return replace(found, is_exact=False)
        return None

    def _turned(self, node: fx.Node, found: Labels) -> Labels | None:
        """The labels of a view of a tensor with these."""
        args: tuple[Any, ...] = node.args
        dims = found.dims
        if node.target is aten.permute.default:
            return replace(found, dims=tuple(dims[dim] for dim in args[1]))
        if node.target in (aten.t.default, aten.transpose.int):
            order = list(dims)
            first, second = args[1:] or (0, -1)
            order[first], order[second] = order[second], order[first]
            return replace(found, dims=tuple(order))
        if node.target is aten.select.int and dims[args[1]] == CLASS:
            kept = [dim for place, dim in enumerate(dims) if place != args[1] % len(dims)]
            return replace(found, dims=tuple(kept), classes=0, label=args[2], table=(args[0], args[2]))
        if node.target is aten.squeeze.dim and dims[args[1]] == ONE:
            return replace(found, dims=tuple(dim for place, dim in enumerate(dims) if place != args[1] % len(dims)))
        if node.target is aten.index.Tensor and dims[0] == CLASS and len(args[1]) == 1:
            position = self._known(args[1][0])
            if position is not None and position.shape == (1,):
                label = int(position)
                return replace(found, dims=(ONE, *dims[1:]), classes=0, label=label, table=(args[0], label))
        return None

    def are_distinct(self, node: fx.Node, dims: Collection[int]) -> bool:
        """Whether a mask holds at most once along these dims: its index ranks along them, and names nothing twice."""
        found = self.labels(node)
        if found is None or found.label is None or len(dims) != 1:
            return False
        index = found.index
        while index.target in SAME and not self.is_written(index):
            index = first_input(index)
        ranked = _ranked_dim(index)
        (dim,) = dims
        return ranked is not None and not self.is_written(index) and found.dims[dim] == ranked % len(found.dims)

    def occupied(self, node: fx.Node) -> fx.Node | None:
        """The table T, for a mask that says of each of its first positions whether anything there is nonzero."""
        if node.target not in ABOVE_ZERO or node.args[1] != 0 or self.is_written(node):
            return None
        total: Any = node.args[0]
        if self.is_written(total) or total.target is not aten.sum.dim_IntList:
            return None
        table, dims = total.args[:2]
        rank = table.meta["val"].dim()
        is_whole = sorted(dim % rank for dim in dims) == list(range(1, rank))
        return table if is_whole and len(total.args) == 2 and _is_never_negative(table) else None

    def reachable(self, node: fx.Node, size: int) -> int:
        """How many of the first positions of such a mask can hold at all: an index is less than the size it is of."""
        table = self.occupied(node)
        found = None if table is None else self.labels(table)
        if found is None or found.dims[0] != CLASS:
            return size
        bound = bound_of(found.index)
        return size if bound is None else min(size, bound)


def _is_never_negative(node: fx.Node) -> bool:
    if node.meta["val"].dtype is torch.bool or node.target in COMPARISONS:
        return True
    if node.target in SAME or node.target in RESHAPES:
        return _is_never_negative(first_input(node))
    if node.target is aten.mul.Tensor:
        return all(isinstance(factor, fx.Node) and _is_never_negative(factor) for factor in node.args)
    return False


def _ranked_dim(index: fx.Node) -> int | None:
    """The dim along which an index ranks: positions of which none is there twice."""
    if index.target is not operator.getitem or index.args[1] != 1:
        return None
    parent: Any = index.args[0]
    place = {aten.topk.default: 2, aten.sort.default: 1}.get(parent.target)
    if place is None:
        return None
    dim = parent.args[place] if len(parent.args) > place else parent.kwargs.get("dim", -1)
    return dim if isinstance(dim, int) else None


def bound_of(index: fx.Node) -> int | None:
    """A number that all elements of an index are below."""
    if index.target in SAME or index.target in RESHAPES or index.target in PARTS:
        return bound_of(first_input(index))
    parent: Any = index
    if index.target is operator.getitem and index.args[1] == 1:
        parent = index.args[0]
    ranked = {aten.topk.default: 2, aten.sort.default: 1, aten.max.dim: 1, aten.argmax.default: 1}
    if parent.target not in ranked or (parent is index) != (parent.target is aten.argmax.default):
        return None
    place = ranked[parent.target]
    default = None if parent.target is aten.argmax.default else -1  # without a dim, it is of all elements
    dim = parent.args[place] if len(parent.args) > place else parent.kwargs.get("dim", default)
    return int(parent.args[0].meta["val"].shape[dim]) if isinstance(dim, int) else None


def any_of(node: fx.Node) -> fx.Node | None:
    """The mask of which a truth value tells whether it holds anywhere, or nowhere."""
    while node.target in NEGATIONS or node.target in SAME:
        node = first_input(node)
    return first_input(node) if node.target is aten.any.default else None
