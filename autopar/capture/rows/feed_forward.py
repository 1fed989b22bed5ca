"""Reads what was computed of selected rows as one expert: down @ f(up @ x), with f elementwise."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ops.pointwise_program import NotPointwiseError, parse
from autopar.sharding.op_call import first_input

aten = torch.ops.aten
FLIPS = frozenset((aten.t.default, aten.numpy_T.default))
CASTS = frozenset((aten._to_copy.default, aten.alias.default))
RESHAPES = frozenset((*CASTS, aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim))
LEFT_OUT = ("device", "layout", "pin_memory", "non_blocking")


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix: `value` or, where it is flipped, its transpose is [outputs, inputs]."""

    value: Tensor
    node: fx.Node
    is_flipped: bool


@dataclass(frozen=True, eq=False)
class Linear:
    """A product with rows; `source`: the node of the rows."""

    source: fx.Node
    weight: Weight
    bias: Tensor | None
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class FeedForward:
    """One expert. `ups`: (product, first and last column) of each argument of the activation."""

    x: Tensor
    ups: tuple[tuple[Linear, int, int], ...]
    activation: str
    down: Linear


@dataclass
class _Text:
    """An elementwise program that is being written."""

    lines: list[str] = field(default_factory=list)
    names: dict[fx.Node, str] = field(default_factory=dict)
    inputs: list[tuple[fx.Node, int, int]] = field(default_factory=list)


class Reader:
    """`values`: of nodes, the tensors that the program holds, through which gradients flow.

    `is_current` tells whether a tensor still holds the value of its node.
    """

    def __init__(self, values: dict[fx.Node, Tensor], is_current: Callable[[fx.Node], bool]) -> None:
        self._values, self._is_current = values, is_current

    def read(self, node: fx.Node) -> FeedForward | None:
        """The expert whose outputs for all tokens a node has; None if it is of another form."""
        down = self._linear(node)
        if down is None:
            return None
        text, shape = _Text(), down.source.meta["val"].shape
        try:
            end = self._write(down.source, text, shape)
            activation = "; ".join([*text.lines, end])
            parse(activation)
        except NotPointwiseError:
            return None
        products = [self._linear(source) for source, _, _ in text.inputs]
        ups = [(up, *span[1:]) for up, span in zip(products, text.inputs, strict=True) if up is not None]
        if len({up.bias is None for up, _, _ in ups}) != 1 or any(up.dtype is not down.dtype for up, _, _ in ups):
            return None
        tokens = [self._tokens(up.source) for up, _, _ in ups]
        x = tokens[0] if tokens else None
        if x is None or any(item is not x for item in tokens):
            return None
        if torch.is_grad_enabled() and not self._have_gradients(
            node, down, [source for source, _, _ in text.inputs], x
        ):
            return None
        return FeedForward(x, tuple(ups), activation, down)

    def _have_gradients(self, node: fx.Node, down: Linear, ups: Sequence[fx.Node], x: Tensor) -> bool:
        """Whether gradients go through all of an expert: no part of it was computed under `no_grad`."""
        inner = self._behind(down.source, RESHAPES)
        if inner is None or inner.requires_grad != any(_wants(self._behind(up, RESHAPES)) for up in ups):
            return False
        return self._passes(node, inner) and all(self._passes(up, x) for up in ups)

    def _passes(self, node: fx.Node, rows: Tensor) -> bool:
        """Whether a product with rows has the gradients that its operands ask for."""
        linear, made = self._linear(node), self._behind(node, RESHAPES)
        if linear is None or made is None:
            return False
        source = self._behind(linear.source, RESHAPES)
        wanted = rows.requires_grad or linear.weight.value.requires_grad or _wants(linear.bias)
        return source is not None and source.requires_grad == rows.requires_grad and made.requires_grad == wanted

    def product(self, node: fx.Node) -> tuple[Tensor, Linear] | None:
        """(rows, what they are multiplied by) of a product with a matrix."""
        found = self._linear(node)
        rows = None if found is None else self._tokens(found.source)
        if found is None or rows is None or (torch.is_grad_enabled() and not self._passes(node, rows)):
            return None
        return rows, found

    def _linear(self, node: fx.Node) -> Linear | None:
        args: tuple[Any, ...] = node.args
        if node.target in RESHAPES - CASTS and args[0].meta["val"].shape == node.meta["val"].shape:
            return self._linear(args[0])
        if node.target is aten.mm.default:
            bias, (rows, matrix) = None, args
        elif node.target is aten.addmm.default and not node.kwargs:
            bias, (rows, matrix) = self._behind(args[0], CASTS), args[1:]
            if bias is None or bias.dim() != 1:
                return None
        else:
            return None
        weight = self._weight(matrix)
        return None if weight is None else Linear(rows, weight, bias, node.meta["val"].dtype)

    def _weight(self, node: fx.Node) -> Weight | None:
        """Of the second operand of a product, which is [inputs, outputs]: the furthest back that is a matrix still."""
        found, is_flipped = None, True
        while node.meta["val"].dim() == 2:
            self._note_slice(node)
            if self._holds(node):
                found = Weight(self._values[node], node, is_flipped)
            if node.target in FLIPS or node.target is aten.permute.default or node.target is aten.transpose.int:
                is_flipped = not is_flipped if node.target in FLIPS or _turns(node) else is_flipped
            elif node.target not in CASTS:
                break
            node = first_input(node)
        return found

    def _note_slice(self, node: fx.Node) -> None:
        """Of a slice of a tensor that the program holds, take one of our own, where its own is not known."""
        args: tuple[Any, ...] = node.args
        if node.target is aten.select.int and node not in self._values and self._holds(args[0]):
            self._values[node] = self._values[args[0]].select(args[1], args[2])

    def _behind(self, node: Any, ops: frozenset[Any]) -> Tensor | None:
        """The tensor that a node is, or is a cast or another shape of."""
        while not self._holds(node) and node.target in ops:
            node = node.args[0]
        return self._values[node] if self._holds(node) else None

    def _holds(self, node: fx.Node) -> bool:
        return node in self._values and self._is_current(node)

    def _tokens(self, node: fx.Node) -> Tensor | None:
        shape, found = node.meta["val"].shape, None
        current: Any = node
        while True:
            if self._holds(current) and self._values[current].shape == shape:
                found = self._values[current]
            if current.target not in RESHAPES:
                return found
            current = current.args[0]

    def _write(self, node: fx.Node, text: _Text, shape: torch.Size) -> str:
        """The name of a value in the program, after the lines that compute it."""
        if node in text.names:
            return text.names[node]
        span = self._span(node)
        if node.meta["val"].shape != shape:
            raise NotPointwiseError(f"{node} is of another shape")
        if span is not None:
            text.inputs.append(span)
            name = f"x{len(text.inputs) - 1}"
        elif node.target is aten.alias.default:
            name = self._write(first_input(node), text, shape)
        else:
            name = self._line(node, text, shape)
        text.names[node] = name
        return name

    def _line(self, node: fx.Node, text: _Text, shape: torch.Size) -> str:
        if not isinstance(node.target, torch._ops.OpOverload):
            raise NotPointwiseError(f"{node} is no op")
        items = [self._argument(item, text, shape) for item in node.args]
        options = {key: item for key, item in node.kwargs.items() if key not in LEFT_OUT}
        items += [f"{key}={self._argument(item, text, shape)}" for key, item in options.items()]
        name = f"y{len(text.lines)}"
        text.lines.append(f"{name} = {node.target}({', '.join(items)})")
        return name

    def _argument(self, item: Any, text: _Text, shape: torch.Size) -> str:
        if isinstance(item, fx.Node):
            return self._write(item, text, shape)
        if isinstance(item, (list, tuple, torch.memory_format)):
            raise NotPointwiseError(f"{item} is no argument of an elementwise op")
        return repr(item)

    def _span(self, node: fx.Node) -> tuple[fx.Node, int, int] | None:
        """(product with the tokens, first and last of its columns) that a node is."""
        args: tuple[Any, ...] = node.args
        if self._is_product(node):
            return node, 0, node.meta["val"].shape[1]
        if node.target is operator.getitem and args[0].target is aten.split.Tensor:
            product, size, *dim = args[0].args
            if self._is_product(product) and dim in ([1], [-1]):
                return product, args[1] * size, args[1] * size + node.meta["val"].shape[1]
        if node.target is aten.slice.Tensor and len(args) == 4 and args[1] in (1, -1) and self._is_product(args[0]):
            return args[0], args[2], args[2] + node.meta["val"].shape[1]
        return None

    def _is_product(self, node: fx.Node) -> bool:
        found = self._linear(node)
        return found is not None and self._tokens(found.source) is not None


def _wants(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _turns(node: fx.Node) -> bool:
    """Whether a permutation of the dims of a matrix, or an exchange of two, is no identity."""
    args: tuple[Any, ...] = node.args
    if node.target is aten.permute.default:
        return bool(args[1][0] % 2)
    return bool(args[1] % 2 != args[2] % 2)
