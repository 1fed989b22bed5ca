"""Recorder: while it is active, every op that runs on fake tensors becomes a node of an fx graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture.known_values import KnownValues, UnknownValueError
from autopar.errors import CaptureError
from autopar.fake_calls import FakeCalls
from autopar.source import calling_line, describe
from autopar.torch_compat import (
    DataDependentOutputException,
    DispatchMode,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    LazyGraphModule,
    below_torch_functions,
    broadcast_shapes,
    is_implicit_composite,
)

_DEVICE = torch.ops.prim.device.default  # a question of the dispatcher's, not an op
_LIFT = torch.ops.aten.lift_fresh.default  # of a fresh tensor; in a graph it must copy, or a run would change it
_LIFT_COPY = torch.ops.aten.lift_fresh_copy.default
_INDEX, _MASKED_SELECT = torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default
_CLONE, _EXPAND, _NONZERO, _TO_COPY = (
    torch.ops.aten.clone.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.nonzero_numpy.default,
    torch.ops.aten._to_copy.default,
)


def node_of(tensor: Tensor) -> fx.Node:
    """The node of a tensor that an op made, or that the traced function was given. Raises AttributeError for others."""
    recorded: tuple[Recorder, fx.Node] = tensor._recorded  # type: ignore[attr-defined]  # set by `_hold`
    return recorded[1]


class Recorder(DispatchMode):
    """Records below autograd, so that forward and backward are ops alike; what a call repeats is not worked out again.

    Invariant: running `graph` on the inputs makes the calls that were made, mutation included. Every node has in
    `meta["val"]` a fake tensor of its own that shares its storage as the op's result did when it was made (a tuple for
    an op with several results). A tensor that no op here made is a constant: a `get_attr` of `constants`.
    """

    supports_higher_order_operators = True  # to refuse them in our own words

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.nodes: list[fx.Node] = []
        self.constants: dict[str, Tensor] = {}
        self.meta: dict[str, Any] = {}  # what new nodes inherit
        self.before_write: Callable[[Tensor], None] | None = None  # asked about each tensor that an op writes into
        self._fakes = FakeCalls(mode)
        self._known = KnownValues(self.nodes, self.constants)
        self._constant_nodes: dict[int, fx.Node] = {}  # by id of the tensor, which `constants` keeps

    def record(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
        """The graph of `function` on fake inputs; its output is a list of nodes for the tensors that it returns."""
        with below_torch_functions():
            for index, value in enumerate(inputs):
                self._hold(value, self._node(self.graph.placeholder(f"arg{index}"), self._snapshot(value)))
        with self._fakes.mode, self:
            results = function(*inputs)
        with below_torch_functions():
            self._node(self.graph.output([self._noded(result) for result in results]), None)
        return LazyGraphModule(self.constants, self.graph)

    def known_value(self, node: fx.Node) -> Tensor | None:
        """The value of a node that nothing but constants reaches."""
        try:
            found: Tensor = self._known.result(_CLONE, (node,), {})
        except UnknownValueError:
            return None
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].device
        if isinstance(func, torch._ops.HigherOrderOperator):
            raise _unsupported(func)
        if any(kind is not FakeTensor for kind in types):
            return NotImplemented  # a subclass of the user's: its own dispatch comes first, and ends in plain ops
        with below_torch_functions():
            return self._call(func, args, kwargs or {})

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_implicit_composite(func, self._device_type(args)):
            with self:
                return func.decompose(*args, **kwargs)
        if self.before_write is not None and func._schema.is_mutable:
            self.before_write(args[0])
        target = _LIFT_COPY if func is _LIFT else func
        name = func.overloadpacket.__name__
        arguments, keywords = self._noded(args), self._noded(kwargs)
        try:
            value = self._fakes(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            try:
                return self._known_result(func, args, kwargs)
            except UnknownValueError:
                raise error from None
        node = self.graph.create_node("call_function", target, (), {}, name)  # faster than with the arguments
        node.args, node.kwargs = arguments, keywords
        if isinstance(value, Tensor):
            self._hold(value, self._node(node, self._snapshot(value)))
        elif isinstance(value, (tuple, list)):
            self._hold_items(value, node)
        elif node.is_impure():
            self._node(node, value)
        else:  # a question to which the answer is known
            self.graph.erase_node(node)
        return value

    def _known_result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call returns whose result, or its shape, depends on values. Raises UnknownValueError.

        Tensors that were computed become constants of the graph; a choice by a known mask becomes one by numbers.
        """
        if func is _INDEX:
            return self._call(func, (args[0], self._numbered(args[1])), kwargs)
        if func is _MASKED_SELECT:
            shape = broadcast_shapes(args[0].shape, args[1].shape)
            source, mask = (self._call(_EXPAND, (item, shape), {}) for item in args)
            return self._call(_INDEX, (source, self._numbered([mask])), {})
        result = self._known.result(func, self._noded(args), self._noded(kwargs))
        return pytree.tree_map_only(Tensor, partial(self._given, self._device_type(args)), result)

    def _numbered(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Indices of an indexing op with every mask, of which the value must be known, replaced by positions."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            positions = self._known.result(_NONZERO, (self._noded(index),), {})
            found.extend(self._given(index.device.type, item) for item in positions)
        return found

    def _given(self, device_type: str, value: Tensor) -> Tensor:
        """A fake of a tensor with a value, which becomes a constant of the graph."""
        fake = self._fakes.mode.from_tensor(value)
        self._hold(fake, self._constant(value))
        if device_type == value.device.type:
            return fake
        moved: Tensor = self._call(_TO_COPY, (fake,), {"device": torch.device(device_type)})
        return moved

    @staticmethod
    def _device_type(args: Sequence[Any]) -> str:
        """Of the first tensor argument; "cpu" without one."""
        return next((value.device.type for value in args if isinstance(value, Tensor)), "cpu")

    def _node(self, node: fx.Node, value: Any) -> fx.Node:
        node.meta.update(self.meta)
        node.meta["val"] = value
        self.nodes.append(node)
        return node

    def _hold(self, tensor: Any, node: fx.Node) -> None:
        """Remember on the tensor itself: another reference to it would change what autograd does in place."""
        tensor._recorded = self, node

    def _node_of(self, tensor: Tensor) -> fx.Node:
        recorded: tuple[Recorder, fx.Node] | None = getattr(tensor, "_recorded", None)
        if recorded is not None and recorded[0] is self:
            return recorded[1]
        return self._constant_nodes.get(id(tensor)) or self._constant(tensor)

    def _hold_items(self, values: Sequence[Any], node: fx.Node) -> None:
        snapshots = tuple(self._snapshot(value) for value in values)
        self._node(node, snapshots)
        for index, (value, snapshot) in enumerate(zip(values, snapshots, strict=True)):
            if isinstance(value, Tensor):
                item = self.graph.create_node("call_function", operator.getitem, (node, index), {}, "getitem")
                self._hold(value, self._node(item, snapshot))

    def _snapshot(self, value: Any) -> Any:
        """The value as it is now: an op such as `transpose_` may change it later."""
        if isinstance(value, FakeTensor):
            return self._fakes.alias(value)
        return tuple(self._snapshot(item) for item in value) if isinstance(value, (tuple, list)) else value

    def _noded(self, value: Any) -> Any:
        """Arguments of a call as arguments of its node."""
        if isinstance(value, Tensor):
            return self._node_of(value)
        if isinstance(value, (tuple, list)):
            return type(value)([self._noded(item) for item in value])
        if isinstance(value, dict):
            return {name: self._noded(item) for name, item in value.items()}
        return value

    def _constant(self, tensor: Tensor) -> fx.Node:
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = tensor
        node = self._node(self.graph.get_attr(name), self._fakes.alias(self._fakes.mode.from_tensor(tensor)))
        self._constant_nodes[id(tensor)] = node
        return node


def _unsupported(op: torch._ops.HigherOrderOperator) -> CaptureError:
    line = calling_line()
    return CaptureError(
        f"the program calls {op}, which takes functions: it cannot be planned",
        where=describe(*line) if line else "",
        fix="compute both branches and choose with torch.where, or write the loop in Python",
    )
