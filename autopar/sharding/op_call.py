"""An op with its arguments, tensors replaced by shapes: all that a rule may look at, and the key of every cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, dtype and strides of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class OpCall:
    """One call of an op: `args` and `kwargs` nest tuples, with a `TensorSpec` where a tensor stood.

    `outputs` are the tensors the op returns, in order (None where an output is not computed).
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[TensorSpec | None, ...]

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensor inputs, flattened in the order in which `fx.Node.all_input_nodes`-like walks meet them.

        A tensor that is passed twice counts twice.
        """
        return tuple(leaf for leaf in walk((self.args, tuple(value for _, value in self.kwargs))) if is_spec(leaf))

    @cached_property
    def name(self) -> str:
        """`aten.mm.default`, `autopar.attention.default`, ..."""
        return op_name(self.target)

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """A positional argument, or the keyword of that name, or the default of the schema."""
        if index < len(self.args):
            return self.args[index]
        return dict(self.kwargs).get(name, default)


def is_spec(leaf: object) -> bool:
    return isinstance(leaf, TensorSpec)


def op_name(target: Callable[..., Any]) -> str:
    """The dotted name of an overload, without the `torch.ops` in front."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", str(target))


def walk(value: Any) -> Iterator[Any]:
    """Leaves of nested tuples, lists and dicts, in order."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from walk(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from walk(item)
    else:
        yield value


def freeze(value: Any) -> Any:
    """Nested lists to tuples, fx nodes to the specs of their values: hashable."""
    if isinstance(value, fx.Node):
        return spec_of(value.meta["val"])
    if isinstance(value, (tuple, list)):
        return tuple(freeze(item) for item in value)
    return value


def first_input(node: fx.Node) -> fx.Node:
    """The node that is an op's first argument."""
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


def spec_of(value: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(value.shape), value.dtype, tuple(value.stride()))


def call_of(node: fx.Node) -> OpCall:
    """The call that a `call_function` node makes; its value must be in `node.meta["val"]`."""
    outputs = tuple(spec_of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in walk(node.meta["val"]))
    kwargs = tuple((name, freeze(item)) for name, item in node.kwargs.items())
    return OpCall(target_of(node), freeze(node.args), kwargs, outputs)


def target_of(node: fx.Node) -> Callable[..., Any]:
    """What a `call_function` node calls."""
    assert callable(node.target)
    return node.target


def tensor_inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes that feed the tensor inputs of `node`, in the order of `OpCall.inputs` (repeats kept)."""
    return tuple(leaf for leaf in walk((node.args, node.kwargs)) if isinstance(leaf, fx.Node))
