"""A torch function of rows: called with all candidates, and proven to compute each row by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture.recorder import node_of
from autopar.capture.rows.equal_values import storages_of
from autopar.capture.rows.places import spread
from autopar.capture.rows.row_wise import Dims, MixesRowsError, row_dims
from autopar.capture.rows.selection import Meaning, Rows, RowState, refuse
from autopar.ops.pointwise_program import IDENTITIES
from autopar.sharding.op_call import op_name


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" if "." in name else f"aten.{name}.default" for name in text.split())


# Ops without a value or a slope for some numbers: rows that are not selected are ones there, so that no gradient of
# theirs, which counts zero times, is infinite.
PARTLY_DEFINED = _names("""
    div.Tensor div.Tensor_mode reciprocal sqrt rsqrt log log2 log10 log1p exp exp2 expm1 pow.Tensor_Tensor
    pow.Tensor_Scalar pow.Scalar remainder.Tensor fmod.Tensor floor_divide linalg_vector_norm
""")
UNDEFINED_AT_ONE = _names("acos asin atanh acosh")
BY_POSITION = _names("embedding gather index.Tensor index_select take")  # what is no row looks up the first entry
SAME_POSITIONS = _names("view _unsafe_view clone _to_copy squeeze") | {op_name(target) for target in IDENTITIES}
CASTS = _names("_to_copy")
PRODUCTS = frozenset((Tensor.__mul__, Tensor.__rmul__, Tensor.mul, torch.mul))

Values = dict[fx.Node, Tensor]


class ByRow:
    """Calls functions by row; `values` is given the tensors of nodes that experts may be made of."""

    def __init__(self, nodes: Sequence[fx.Node], values: Values, meaning: Meaning) -> None:
        self._nodes, self._values, self._meaning = nodes, values, meaning

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result, rows where it has any. Raises DataDependentError if a row may depend on others."""
        rows = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Rows)]
        selection = rows[0].state.selection
        if any(item.state.selection is not selection for item in rows):
            refuse("rows of two selections are computed with together")
        space = selection.ordered({dim for item in rows for dim in item.state.space})
        first = len(self._nodes)
        result, dims = self._on_all(func, args, kwargs, space, lambda dense, _: dense)
        made = {op_name(node.target) for node in self._nodes[first:] if callable(node.target)}
        if made & UNDEFINED_AT_ONE:
            refuse(f"{min(made & UNDEFINED_AT_ONE)} of selected rows has no value for others")
        if made & (PARTLY_DEFINED | BY_POSITION):
            fill = 1 if made & PARTLY_DEFINED else 0
            result, dims = self._on_all(func, args, kwargs, space, partial(_filled, fill))

        def wrapped(value: Tensor) -> Tensor:
            dim = dims.get(node_of(value)) if hasattr(value, "_recorded") else None
            if not isinstance(dim, int):
                return value
            same = [item for item in rows if item.state.dense is value]
            if same:
                return same[0]
            state = RowState(value, dim, space, selection)
            _note_source(state, rows, made)
            if func in PRODUCTS and not kwargs and all(isinstance(item, (Rows, int, float)) for item in args):
                state.factors = tuple(self._as_it_is(item) for item in args)
            return Rows.of(state, self._meaning)

        return pytree.tree_map_only(Tensor, wrapped, result)

    def _as_it_is(self, item: Any) -> Any:
        """Rows that stay when these are written to."""
        return Rows.of(copy(item.state), self._meaning) if isinstance(item, Rows) else item

    def _on_all(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        space: tuple[int, ...],
        form: Callable[[Tensor, RowState], Tensor],
    ) -> tuple[Any, Dims]:
        """(the result for all candidates, the dims of the rows of all nodes made for it)."""
        dims: Dims = {}

        def dense(leaf: Any) -> Any:
            if not isinstance(leaf, Rows):
                self.note(leaf)
                return leaf
            state = leaf.state
            self.note(state.dense)
            value = spread(form(state.dense, state), state.dim, state.space, space, state.selection)
            dims[node_of(value)] = state.dim
            return value

        first_rows = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Rows))
        plain_args, plain_kwargs = pytree.tree_map(dense, (args, kwargs))
        first = len(self._nodes)
        result = func(*plain_args, **plain_kwargs)
        try:
            row_dims(self._nodes[first:], dims, first_rows.state.selection.candidates(space))
        except MixesRowsError as error:
            what = f"the shape of selected rows depends on data, and {error} may let them depend on each other"
            refuse(what, selected_at=first_rows.state.selection.where)
        return result, dims

    def note(self, value: Any) -> None:
        """Remember the tensor of a node."""
        if isinstance(value, Tensor) and not isinstance(value, Rows) and hasattr(value, "_recorded"):
            self._values[node_of(value)] = value


def _note_source(state: RowState, rows: Sequence[Rows], made: set[str]) -> None:
    """What new rows have in common with those that they were computed of, by the ops in between."""
    for item in rows:
        if storages_of([item.state.dense]) == storages_of([state.dense]):
            item.state.is_shared = state.is_shared = True
    if len(rows) == 1 and made <= SAME_POSITIONS and state.dense.shape == rows[0].state.dense.shape:
        state.coordinate = rows[0].state.coordinate
    if len(rows) == 1 and made <= CASTS:
        state.factors = rows[0].state.factors


def _filled(value: int, dense: Tensor, state: RowState) -> Tensor:
    """The value where there is no row."""
    shape = [1] * dense.dim()
    shape[state.dim] = -1
    return torch.where(state.selection.mask_along(state.space).reshape(shape), dense, value)
