"""Which recorded values are equal because they are computed alike from the same values."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture.functionalize import mutates
from autopar.torch_compat import below_torch_functions

Name = Hashable
DEPTH = 8  # ops back from a value; what lies behind is equal to itself alone


class EqualValues:
    """Names values: equal names, equal values. `nodes`: all recorded so far, which others append to."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self._nodes = nodes
        self._looked_at = 0
        self._written: dict[int, int] = {}  # by storage the place of the last node that writes there
        self._places: dict[fx.Node, int] = {}

    def name(self, node: fx.Node) -> Name:
        """Of a value; its own where it is drawn, or where something wrote into memory that it was computed from."""
        self._look_at_new_nodes()
        return self._name(node, DEPTH)

    def is_written(self, node: fx.Node) -> bool:
        """Whether anything wrote into the memory of a value."""
        self._look_at_new_nodes()
        return not self._written.keys().isdisjoint(_storages(node))

    def is_current(self, node: fx.Node) -> bool:
        """Whether the memory of a value still holds it."""
        self._look_at_new_nodes()
        return all(self._written.get(storage, -1) <= self._places[node] for storage in _storages(node))

    def _look_at_new_nodes(self) -> None:
        for place in range(self._looked_at, len(self._nodes)):
            node = self._nodes[place]
            self._places[node] = place
            if mutates(node):
                self._written.update(dict.fromkeys(_storages(node), place))
        self._looked_at = len(self._nodes)

    def _name(self, node: fx.Node, depth: int) -> Name:
        if (
            not depth
            or node.op != "call_function"
            or mutates(node)
            or not self._written.keys().isdisjoint(_storages(node))
        ):
            return node
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return node
        parts = tuple(self._part(item, depth - 1) for item in pytree.tree_leaves((node.args, node.kwargs)))
        return str(node.target), parts, str(pytree.tree_structure((node.args, node.kwargs)))

    def _part(self, item: Any, depth: int) -> Name:
        return self._name(item, depth) if isinstance(item, fx.Node) else (type(item).__name__, str(item))


def _storages(node: fx.Node) -> set[int]:
    return storages_of(value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, Tensor))


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """What identifies the memory of tensors."""
    with below_torch_functions():
        return {tensor.untyped_storage()._cdata for tensor in tensors}
