"""Values that follow from constants alone: a program may branch on them, or shape a tensor by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.torch_compat import FakeTensor, outside_tracing

_CPU = torch.device("cpu")


class UnknownValueError(Exception):
    """A value depends on an input, a parameter, a buffer or a random number."""


class KnownValues:
    """The values of recorded nodes that nothing but constants reaches, computed on the CPU when one is asked for.

    `nodes`: all recorded so far in the order of their calls, which others append to; mutation is replayed in it.
    """

    def __init__(self, nodes: Sequence[fx.Node], constants: Mapping[str, Tensor]) -> None:
        self._nodes, self._constants = nodes, constants
        self._done = 0  # nodes looked at
        self._values: dict[fx.Node, Any] = {}
        self._overwritten: set[int] = set()  # storages into which something unknown was written

    def result(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What a call that is not recorded returns, tensors in memory of their own. Raises UnknownValueError."""
        self._look_at_new_nodes()
        with outside_tracing(), torch.no_grad():
            found = _computed(target, *self._real((args, kwargs)))
            return pytree.tree_map_only(Tensor, lambda item: item.clone(memory_format=torch.contiguous_format), found)

    def _look_at_new_nodes(self) -> None:
        with outside_tracing(), torch.no_grad():
            for node in self._nodes[self._done :]:
                self._look_at(node)
        self._done = len(self._nodes)

    def _real(self, value: Any) -> Any:
        return pytree.tree_map_only(fx.Node, self._value_of, value)

    def _value_of(self, node: fx.Node) -> Any:
        value = self._values.get(node)
        if value is None or any(_storage(item) in self._overwritten for item in _tensors(value)):
            raise UnknownValueError(node.name)
        return value

    def _look_at(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            held = self._constants[str(node.target)]
            if not isinstance(held, FakeTensor) and not held.is_meta:
                self._values[node] = held.detach().to(_CPU, copy=True)
        if node.op != "call_function":
            return
        try:
            self._values[node] = _computed(node.target, *self._real((node.args, node.kwargs)))
        except UnknownValueError:
            for value in _written(node):
                if value in self._values:
                    self._overwritten.update(_storage(item) for item in _tensors(self._values[value]))


def _computed(target: Any, args: Any, kwargs: Any) -> Any:
    """A call on the CPU, whatever device the program names. Raises UnknownValueError where it cannot be made there."""
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        raise UnknownValueError(str(target))
    args, kwargs = pytree.tree_map_only(torch.device, lambda _: _CPU, (args, kwargs))
    try:
        return target(*args, **kwargs)
    except RuntimeError as error:  # such as an op without a kernel for the CPU
        raise UnknownValueError(str(target)) from error


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes into whose values a call writes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.kwargs.get(argument.name, node.args[index] if index < len(node.args) else None)
            yield from (item for item in pytree.tree_leaves(value) if isinstance(item, fx.Node))


def _tensors(value: Any) -> list[Tensor]:
    return [item for item in pytree.tree_leaves(value) if isinstance(item, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
