"""The proof that ops compute each row by itself: where every rank may compute its rows, any rows can be left out.

A rule that shards a dim of the inputs and a dim of the outputs, by the plain call of the op, holds for any number of
ranks: for as many as there are rows, too, each with one. Then no row depends on another, nor on where it stands.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from torch import Tensor, fx
from torch.distributed.tensor import Shard

from autopar.capture.functionalize import mutates
from autopar.sharding.layout import shard_dim
from autopar.sharding.op_call import OpCall, TensorSpec, call_of, first_input, op_name, tensor_inputs
from autopar.sharding.registry import rules_of
from autopar.sharding.rule import Rule
from autopar.sharding.rules.pointwise import is_pointwise

FILLED = frozenset(  # no element has anything to do with where it stands, once drawn
    f"{name}.default"
    for name in (
        *(f"aten.{kind}" for kind in ("full", "zeros", "ones", "scalar_tensor")),
        *(f"autopar.random_{kind}" for kind in ("mask", "uniform", "normal", "integers")),
    )
)


class Alike(Enum):
    """In the place of a dim: all rows of a value are alike, or drawn alike."""

    ROWS = 0


Dim = int | Alike
Dims = dict[fx.Node, Any]  # by node the dim of its rows; a tuple for an op with several results


class MixesRowsError(Exception):
    """An op lets a row of its result depend on other rows, or is not known not to."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(op_name(node.target) if callable(node.target) else str(node.target))


def row_dims(nodes: Iterable[fx.Node], dims: Dims, rows: int) -> None:
    """Add to `dims` what the rows of each node's result lie along, `rows` of them; nodes without rows are left out.

    Raises MixesRowsError.
    """
    for node in nodes:
        if node.op != "call_function":
            continue
        if node.target is operator.getitem:
            parent = first_input(node)
            if parent in dims:
                dims[node] = dims[parent][node.args[1]]
            continue
        inputs = [dims.get(source) for source in tensor_inputs(node)]
        found = _of_no_rows(node, inputs) if not any(isinstance(item, int) for item in inputs) else None
        if any(isinstance(item, int) for item in inputs):
            found = _through(node, inputs, rows)
        if found is not None:
            dims[node] = found


def _of_no_rows(node: fx.Node, inputs: Sequence[Dim | None]) -> Dim | None:
    if not isinstance(node.meta["val"], Tensor):
        return None
    call = call_of(node)
    if call.name in FILLED:
        return Alike.ROWS
    return Alike.ROWS if inputs and all(inputs) and is_pointwise(call) else None


def _through(node: fx.Node, inputs: Sequence[Dim | None], rows: int) -> Any:
    """The dims of the results of an op that reads rows."""
    if mutates(node):
        raise MixesRowsError(node)
    call = call_of(node)
    for rule in rules_of(call):
        outputs = [shard_dim(placement) for placement in rule.outputs]
        if _is_by_row(rule) and _reads(rule, inputs) and _writes(call, outputs, rows):
            return outputs[0] if isinstance(node.meta["val"], Tensor) else tuple(outputs)
    raise MixesRowsError(node)


def _is_by_row(rule: Rule) -> bool:
    special = (rule.form, rule.halo, rule.ring, rule.dispatch, rule.splits)
    return not any(special)


def _reads(rule: Rule, inputs: Sequence[Dim | None]) -> bool:
    for placement, rows in zip(rule.inputs, inputs, strict=True):
        dim = placement.dim if isinstance(placement, Shard) else None
        fits = dim == rows if not isinstance(rows, Alike) else dim is not None or placement.is_replicate()
        if not fits or placement.is_partial():
            return False
    return True


def _writes(call: OpCall, outputs: Sequence[int | None], rows: int) -> bool:
    pairs = zip(call.outputs, outputs, strict=True)
    return all(spec is None or (dim is not None and _size(spec, dim) == rows) for spec, dim in pairs)


def _size(spec: TensorSpec, dim: int) -> int:
    return spec.shape[dim] if dim < len(spec.shape) else 0
