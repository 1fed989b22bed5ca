"""RowTracer: torch functions on rows that data selects, computed for all candidates and masked at the write back."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.capture.recorder import Recorder
from autopar.capture.rows.by_row import ByRow, Values
from autopar.capture.rows.conditions import Conditions, are_in
from autopar.capture.rows.layers import Layers, PlaceOf
from autopar.capture.rows.pieces import Pieces, RowSize
from autopar.capture.rows.places import Place, place_of, taken
from autopar.capture.rows.selection import Increment, Rows, RowState, refuse
from autopar.capture.rows.writes import Writes
from autopar.torch_compat import applying_function

Function = Callable[..., Any]
Replace = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]

QUESTIONS = frozenset(  # functions that read no value
    ("dim", "size", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_contiguous", "__len__",
     "__get__", "untyped_storage", "data_ptr", "storage_offset", "__hash__", "get_device")
)  # fmt: skip
NOTED = frozenset(
    ("__getitem__", "eq", "__eq__", "one_hot", "unbind")
)  # functions whose first tensor experts may be made of
NUMBERS = frozenset(("__iter__", "__len__", "tolist", "item", "__bool__", "numpy", "size", "numel"))
PLAIN_NUMBERS = frozenset(
    ("dim", "ndim", "ndimension", "element_size", "itemsize", "get_device", "output_nr", "_version")
)
WRITERS = frozenset(
    (Tensor.__getitem__, Tensor.__setitem__, Tensor.index_add_, Tensor.index_put_)
)  # what waits is for them to see to
SUMS = frozenset((Tensor.__iadd__, Tensor.add_))
WITHOUT_A_COLUMN = ((-1,), ([-1],), (1,), (), (0, -1))  # arguments that make a matrix of one column a vector


class RowTracer:
    """Stands before another `replace` of the tracer: starts rows where data selects them, and follows them.

    `place`: gives contexts in which ops come from a line and from the module that runs now.
    """

    def __init__(self, replace: Replace, recorder: Recorder, place: PlaceOf) -> None:
        self._next = replace
        values: Values = {}
        self._conditions = Conditions(recorder, self)
        self._by_row = ByRow(recorder.nodes, values, self)
        self._layers = Layers(values, self._conditions.masks, self._conditions.equal, place)
        conditions = self._conditions
        self._writes = Writes(conditions.branches, self._layers, conditions.masks, conditions.names)
        self._pieces = Pieces(values, self._conditions.equal, self)
        self._called: Function = torch.where  # the function that is being answered
        self._starts: Mapping[Function, Function] = {
            **dict.fromkeys((torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere), self._nonzero),
            torch.where: self._where,
            Tensor.__getitem__: self._item,
            Tensor.__setitem__: self._set_item,
            Tensor.__bool__: self._bool,
            Tensor.__format__: self._format,
            Tensor.item: self._number,
            Tensor.split: self._split,
        }
        self._meanings: Mapping[Function, Function] = {
            Tensor.__getitem__: self._item,
            Tensor.__setitem__: self._set_item,
            **dict.fromkeys((Tensor.index_add, torch.index_add), self._add_rows),
            Tensor.index_add_: self._add_rows_in_place,
            **dict.fromkeys((Tensor.index_put_, torch.index_put_), self._put_rows),
            **dict.fromkeys((Tensor.squeeze, torch.squeeze, Tensor.flatten, torch.flatten), self._column),
            **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), self._column),
            **dict.fromkeys((Tensor.unbind, torch.unbind), self._columns),
            **dict.fromkeys((Tensor.index_select, torch.index_select), self._index_select),
            **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), self._cat),
        }

    def replace(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `Observer` asks for each torch function."""
        name = getattr(func, "__name__", "")
        if name in NOTED and args:
            self._by_row.note(args[0])
        if self._conditions.have_begun or self._pieces.have_begun:
            leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if name not in QUESTIONS:
                self._layers.flush_for(leaves[1:] if func in WRITERS else leaves)
                is_in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
                self._layers.flush_before_write(leaves[:1] if is_in_place and func not in WRITERS else ())
            if are_in(leaves):
                return self.call(func, args, kwargs)
        start = None if self._conditions.is_asking else self._starts.get(func)
        return start(*args, **kwargs) if start is not None else self._next(func, args, kwargs)

    def finish(self) -> None:
        """The program has run: nothing is left in wait."""
        self._layers.flush()

    def notes(self) -> tuple[str, ...]:
        """What a plan has to say of how rows are computed."""
        return (*self._writes.notes(), *dict.fromkeys(self._pieces.notes))

    def check_reassigned(self, values: Iterable[Tensor]) -> None:
        """Buffers are set to these: not in a branch that data decides, which would have to undo it.

        Raises DataDependentError.
        """
        self._conditions.check_reassigned(values)

    def check_write(self, written: Tensor) -> None:
        """An op is about to write into a tensor. Raises DataDependentError where it must not."""
        if not self._writes.is_writing and not self._layers.is_writing:
            self._conditions.check_write(written)

    # Where rows begin

    def _nonzero(self, condition: Tensor, *, as_tuple: bool = False) -> Any:
        return self._conditions.where(condition) if as_tuple else self._conditions.nonzero(condition)

    def _where(self, condition: Tensor, *values: Any, **kwargs: Any) -> Any:
        if values or kwargs:
            return self._next(torch.where, (condition, *values), kwargs)
        return self._conditions.where(condition)

    def _bool(self, value: Tensor) -> bool:
        found = self._conditions.known(Tensor.__bool__, value)
        return self.truth(value) if found is NotImplemented else bool(found)

    def truth(self, value: Tensor) -> bool:
        """Which way a branch goes that data decides."""
        return self._conditions.truth(value)

    def candidates_in_turn(self, rows: Rows) -> Iterator[Tensor]:
        """A loop over rows."""
        return self._conditions.turns(rows)

    def _format(self, value: Tensor, spec: str) -> Any:
        """Of one number, if it is known: the number's."""
        number = NotImplemented if value.dim() else self._conditions.known(Tensor.item, value)
        return self._next(Tensor.__format__, (value, spec), {}) if number is NotImplemented else format(number, spec)

    # Pieces

    def _number(self, value: Tensor) -> Any:
        found = self._conditions.known(Tensor.item, value)
        if found is NotImplemented:
            found = self._pieces.size_of(value)
        return self._next(Tensor.item, (value,), {}) if found is None else found

    def _split(self, tensor: Tensor, split_size: Any, dim: int = 0) -> Any:
        if isinstance(split_size, (list, tuple)) and any(isinstance(size, RowSize) for size in split_size):
            return self._pieces.split(tensor, split_size, dim)
        return self._next(Tensor.split, (tensor, split_size, dim), {})

    def _cat(self, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
        joined = None if kwargs else self._pieces.joined(tensors, dim)
        return self._by_row.call(self._called, (tensors, dim), kwargs) if joined is None else joined

    # Rows taken

    def _item(self, base: Any, key: Any) -> Any:
        if isinstance(base, Rows):
            return self._item_of_rows(base, key)
        key = self._conditions.with_positions(key)
        if not are_in(key):
            self._layers.flush_for([base])
            return self._next(Tensor.__getitem__, (base, key), {})
        self._by_row.note(base)
        waiting = self._layers.waiting_for(base)
        with self._layers.held():
            place = place_of(base, key)
            dense, space = taken(place)
        increment = Increment(base, key, base._version, waiting)
        return Rows.of(RowState(dense, place.first, space, place.selection, increment=increment), self)

    def _index_select(self, base: Any, dim: int, index: Any) -> Any:
        if isinstance(base, Rows):
            refuse("selected rows are selected from again")
        return self._item(base, (slice(None),) * (dim % base.dim()) + (index,))

    def _item_of_rows(self, base: Rows, key: Any) -> Any:
        entries = key if isinstance(key, tuple) else (key,)
        is_column = len(entries) == 2 and entries[0] in (slice(None), ...) and isinstance(entries[1], int)
        if base.state.is_matrix and is_column:
            return self._conditions.positions(base.state.selection)[entries[1]]
        if any(isinstance(entry, Tensor) and entry.dim() for entry in entries):
            refuse("selected rows are selected from again")
        return self._by_row.call(Tensor.__getitem__, (base, key), {})

    def _column(self, rows: Any, *args: Any, **kwargs: Any) -> Any:
        """Of a matrix of one column: the column, whatever function takes the second dim away."""
        is_alone = isinstance(rows, Rows) and rows.state.is_matrix and len(rows.state.selection.sizes) == 1
        if is_alone and args in WITHOUT_A_COLUMN and not kwargs:
            return self._conditions.positions(rows.state.selection)[0]
        return self._by_row.call(self._called, (rows, *args), kwargs)

    def _columns(self, rows: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(rows, Rows) and rows.state.is_matrix and (args or tuple(kwargs.values())) in ((1,), (-1,)):
            return self._conditions.positions(rows.state.selection)
        return self._by_row.call(self._called, (rows, *args), kwargs)

    # Rows written

    def _set_item(self, base: Any, key: Any, value: Any) -> Any:
        if isinstance(base, Rows):
            refuse("elements of selected rows are written to", "compute them with torch.where")
        if not are_in((key, value)):  # a mask and one value: a shape that is fixed
            self._layers.flush_before_write([base])
            return self._next(Tensor.__setitem__, (base, key, value), {})
        key = self._conditions.with_positions(key)
        if not are_in(key):
            refuse("selected rows are written to places that are not those rows'")
        with self._layers.held():
            place = place_of(base, key)
        increment = value.state.increment if isinstance(value, Rows) else None
        if increment is not None and increment.delta is not None and self._is_sum(base, place, increment):
            self._writes.add(place, increment.delta)
        else:
            self._writes.put(place, self._settled(value) if isinstance(value, Rows) else value)
        return None

    def _is_sum(self, base: Tensor, place: Place, increment: Increment) -> bool:
        """Whether rows are those of a place as it is now, plus something."""
        is_now = increment.version == base._version and increment.waiting == self._layers.waiting_for(base)
        if increment.target is not base or not is_now or not self._writes.is_certain(place):
            return False
        with self._layers.held():
            before = place_of(base, increment.key)
            return place.is_same(before)

    def _settled(self, rows: Rows) -> Rows:
        """Rows whose values are what they are to be: writes in wait, when they were taken, are made first."""
        increment = rows.state.increment
        if increment is None or not increment.waiting:
            return rows
        if self._layers.waiting_for(increment.target) != increment.waiting:
            refuse("a tensor was written to while rows taken of it were in use", "take the rows of a copy (x.clone())")
        self._layers.flush_for([increment.target])
        rows.state = self._item(increment.target, increment.key).state
        return rows if increment.delta is None else self._in_place(Tensor.__add__, (rows, increment.delta), {})

    def _add_rows_in_place(self, base: Any, dim: int, index: Any, source: Any, *, alpha: float = 1) -> Any:
        if isinstance(base, Rows) or not isinstance(index, Rows):
            refuse("index_add_ mixes selected rows with tensors that are none")
        with self._layers.held():
            place = place_of(base, (slice(None),) * (dim % base.dim()) + (index,))
        self._writes.add(place, source, alpha=alpha)
        return base

    def _add_rows(self, base: Any, dim: int, index: Any, source: Any, *, alpha: float = 1) -> Any:
        return self._add_rows_in_place(base.clone(), dim, index, source, alpha=alpha)

    def _put_rows(self, base: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:  # noqa: FBT001
        with self._layers.held():
            place = place_of(base, tuple(indices))
        (self._writes.add if accumulate else self._writes.put)(place, values)
        return base

    # Functions of rows

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function some of whose arguments are rows."""
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Rows):
                is_set = (func in SUMS and leaf is args[0]) or (func is Tensor.__setitem__ and leaf is args[2])
                self._check(leaf if is_set else self._settled(leaf))
        if applying_function():
            refuse("an autograd.Function is applied to selected rows", "write its forward in plain ops")
        self._called = func
        name = getattr(func, "__name__", "")
        meaning = self._meanings.get(func)
        if meaning is not None:
            return meaning(*args, **kwargs)
        if name in NUMBERS:
            return getattr(args[0], name)(*args[1:], **kwargs)
        if name == "__get__" and not isinstance(value := func(args[0].state.dense), Tensor):
            return _answer(func.__self__.__name__, value)
        twin = _out_of_place(func, args, kwargs)
        return _answer(name, self._by_row.call(func, args, kwargs)) if twin is None else self._in_place(*twin)

    def _check(self, rows: Rows) -> None:
        """Rows are about to be used: nothing was written to what they were taken of. Raises DataDependentError."""
        rows.state.check_unchanged()
        if not rows.state.is_waiting:
            self._layers.flush_for([rows.state.dense])

    def _in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Rows that are written to, as a whole: their values are those of `func`, which writes nowhere."""
        rows = args[0]
        if not isinstance(rows, Rows) or rows.state.is_shared:
            refuse("an op writes selected rows into a tensor, or into one that others are views of")
        before, increment = rows.state, None
        is_sum = func in (Tensor.__add__, Tensor.add) and len(args) == 2 and not kwargs and isinstance(args[1], Rows)
        if is_sum and before.increment is not None and before.increment.delta is None:
            delta = Rows.of(copy(args[1].state), self)  # as it is now
            increment = dataclasses.replace(before.increment, delta=delta)
            if increment.waiting:
                rows.state = dataclasses.replace(before, increment=increment)
                return rows
        result = self._by_row.call(func, (self._settled(rows), *args[1:]), kwargs).state
        if result.dense.shape[result.dim + 1 :] != before.dense.shape[before.dim + 1 :]:
            refuse("an op in place changes the shape of selected rows")
        if result.dense.dtype is not before.dense.dtype:
            result = self._by_row.call(Tensor.to, (Rows.of(result, self), before.dense.dtype), {}).state
        result.increment = increment
        rows.state = result
        return rows


def _answer(question: str, value: Any) -> Any:
    """A result, which is no number that the number of rows could be in."""
    numbers = [
        leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
    ]
    if numbers and question not in PLAIN_NUMBERS:
        refuse(f"the program asks for the {question} of selected rows, which depends on data")
    return value


def _out_of_place(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """For a function that writes into its first argument: the call that returns the same."""
    name = getattr(func, "__name__", "")
    if name.startswith("__i") and name not in ("__invert__", "__index__", "__iter__", "__int__"):
        return getattr(Tensor, f"__{name[3:]}"), args, kwargs
    if name.endswith("_") and not name.endswith("__"):
        owner = next((owner for owner in (Tensor, torch, torch.nn.functional) if hasattr(owner, name[:-1])), None)
        return None if owner is None else (getattr(owner, name[:-1]), args, kwargs)
    if isinstance(func, FunctionType) and "inplace" in inspect.signature(func).parameters:
        bound = inspect.signature(func).bind(*args, **kwargs)
        if bound.arguments.get("inplace"):
            bound.arguments["inplace"] = False
            return func, bound.args, bound.kwargs
    return None
