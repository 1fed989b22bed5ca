"""Rows split by sizes that are known at run time alone (`x.split(counts.tolist())`), and joined again by `cat`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from autopar.capture.recorder import node_of
from autopar.capture.rows.by_row import Values
from autopar.capture.rows.equal_values import EqualValues
from autopar.capture.rows.feed_forward import Reader
from autopar.capture.rows.layers import stacked
from autopar.capture.rows.selection import Meaning, Rows, RowState, Selection, refuse
from autopar.source import calling_line, describe

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class RowSize:
    """A number of a tensor that was asked for as a Python number: a size to split rows by, and nothing else."""

    sizes: Tensor
    place: int

    def _unknown(self, *_: object) -> NoReturn:
        refuse(
            "the program computes with numbers of a tensor as Python numbers, which depend on data",
            "keep them in the tensor; as sizes of x.split(sizes) they may stay as they are",
        )

    __index__ = __int__ = __float__ = __bool__ = __format__ = __str__ = __repr__ = __len__ = __iter__ = _unknown
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _unknown
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _unknown
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __divmod__ = _unknown
    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False)
class Split:
    """All pieces of a tensor along its dim `dim`, in their order; `ends`: where each ends."""

    dim: int
    ends: Tensor
    selections: tuple[Selection, ...]


class Pieces:
    """Splits tensors, and joins what was computed of all their pieces."""

    def __init__(self, values: Values, equal: EqualValues, meaning: Meaning) -> None:
        self._values, self._name, self._meaning = values, equal.name, meaning
        self._reader = Reader(values, equal.is_current)
        self._splits: dict[Selection, Split] = {}
        self.notes: list[str] = []

    @property
    def have_begun(self) -> bool:
        """Whether there can be rows."""
        return bool(self._splits)

    def size_of(self, number: Tensor) -> RowSize | None:
        """`number.item()`, for an element of a vector of integers, as `tolist` asks for them; None for any other."""
        node: Any = node_of(number)
        if node.target is not operator.getitem or node.args[0].target is not aten.unbind.int:
            return None
        numbers = self._values.get(node.args[0].args[0])
        is_count = number.dim() == 0 and number.dtype in (torch.int32, torch.int64)
        return RowSize(numbers, node.args[1]) if numbers is not None and numbers.dim() == 1 and is_count else None

    def split(self, tensor: Tensor, sizes: Sequence[RowSize], dim: int) -> tuple[Rows, ...]:
        """`tensor.split(sizes, dim)`; on one device the sizes must add up to the tensor's."""
        counts = sizes[0].sizes
        if any(size.sizes is not counts or size.place != place for place, size in enumerate(sizes)):
            refuse("rows are split by numbers of several tensors, or in another order")
        if counts.shape[0] != len(sizes):
            refuse("rows are split by some of the numbers of a tensor")
        line = calling_line()
        where = describe(*line) if line else ""
        dim %= tensor.dim()
        with torch.no_grad():
            ends = counts.cumsum(0)
            rows = torch.arange(tensor.shape[dim], device=tensor.device)
            masks = [(rows >= ends[place] - counts[place]) & (rows < ends[place]) for place in range(len(sizes))]
        selections = tuple(Selection(mask, mask, where, mask._version) for mask in masks)
        split = Split(dim, ends, selections)
        self._splits.update(dict.fromkeys(selections, split))
        if node_of(tensor) not in self._values:
            self._values[node_of(tensor)] = tensor
        states = [RowState(aten.alias(tensor), dim, (0,), selection) for selection in selections]
        return tuple(Rows.of(state, self._meaning) for state in states)

    def joined(self, parts: Sequence[Any], dim: int) -> Tensor | None:
        """`torch.cat(parts, dim)` of what was computed of all the pieces of a tensor; None if they are others."""
        if not all(isinstance(part, Rows) for part in parts):
            return None
        states = [part.state for part in parts]
        split = self._splits.get(states[0].selection)
        if split is None or [state.selection for state in states] != list(split.selections):
            return None
        if any(state.dim != dim % state.dense.dim() or state.is_waiting for state in states):
            return None
        found = self._product(states, split)
        if found is None:
            self.notes.append(
                f"{split.selections[0].where}: what is computed of each piece is no product with a matrix: it is "
                f"computed of all rows {len(states)} times, and masked, whatever the sizes are"
            )
            shape = [-1 if place == states[0].dim else 1 for place in range(states[0].dense.dim())]
            masks = [state.selection.mask.reshape(shape) for state in states]
            addends = [torch.where(mask, state.dense, 0) for mask, state in zip(masks, states, strict=True)]
            found = torch.stack(addends).sum(0, dtype=addends[0].dtype)
        return found

    def _product(self, states: Sequence[RowState], split: Split) -> Tensor | None:
        """The pieces times a matrix each, as one product in groups."""
        self._values.update({node_of(state.dense): state.dense for state in states})
        products = [self._reader.product(node_of(state.dense)) for state in states]
        found = [item for item in products if item is not None]
        if len(found) < len(states) or split.dim:
            return None
        rows, linear = found[0]
        alike = all(
            item[0] is rows and item[1].bias is None and item[1].weight.is_flipped == linear.weight.is_flipped
            and item[1].weight.value.shape == linear.weight.value.shape
            for item in found
        )  # fmt: skip
        if not alike:
            return None
        matrices = (
            stacked([item.weight for _, item in found], self._values, self._name).transpose(1, 2).to(linear.dtype)
        )
        with torch.no_grad():
            ends = split.ends.to(torch.int32)
        product: Tensor = torch.ops.autopar.grouped_mm(rows.to(linear.dtype), matrices, ends, 0)
        return product
