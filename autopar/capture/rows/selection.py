"""Rows that a condition selects: how many there are is known at run time alone, so all are computed.

A condition of sizes [S0, S1, ...] has as many candidates as elements, in their order; those where it holds are the
rows that the program on one device has. A tensor with a dim of such rows is held for every candidate (`dense`): what
is computed on rows that are not selected never counts, since all that is written back goes through the mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from autopar.errors import DataDependentError
from autopar.source import calling_line, describe
from autopar.torch_compat import below_torch_functions, wrapper_tensor

ADVICE = (
    "between `nonzero`, `torch.where` or a mask and the write back (`index_add_`, `out[mask] = ...`) every op must "
    "compute each row by itself; else use a mask of fixed shape with torch.where, topk, autopar.nn.Experts, or "
    "transformers' experts interface"
)


def refuse(what: str, fix: str = ADVICE, *, selected_at: str = "") -> NoReturn:
    """Raise DataDependentError with the user's line, and with that where the rows were selected."""
    line = calling_line()
    where = describe(*line) if line else ""
    if selected_at not in ("", where):
        where = f"{where}\n  of rows selected at {selected_at}"
    raise DataDependentError(what, where=where, fix=fix)


@dataclass(frozen=True, eq=False)
class Selection:
    """Which candidates are rows. `where`: the user's line that selects them."""

    mask: Tensor  # bool
    condition: Tensor  # what the mask was made of
    where: str
    version: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.mask.shape)

    @property
    def dims(self) -> tuple[int, ...]:
        """All dims of the condition, the longest first: candidates are held in that order, in which no op can see them.

        The longest is that of the tokens, which can be cut over ranks where it comes first.
        """
        return self.ordered(range(len(self.sizes)))

    def ordered(self, dims: Iterable[int]) -> tuple[int, ...]:
        """Some dims of the condition in the order in which candidates are held."""
        return tuple(sorted(dims, key=lambda dim: (-self.sizes[dim], dim)))

    def mask_along(self, space: tuple[int, ...], mask: Tensor | None = None) -> Tensor:
        """[candidates] of these dims: whether any row is among those that differ in the other dims alone."""
        held = self.mask if mask is None else mask
        others = [dim for dim in self.dims if dim not in space]
        held = held.permute(*space, *others)
        return held.flatten(len(space)).any(-1).flatten() if others else held.flatten()

    def candidates(self, space: tuple[int, ...]) -> int:
        """Of rows that differ in these dims of the condition alone."""
        return math.prod(self.sizes[dim] for dim in space)

    def check_unchanged(self) -> None:
        """Raises DataDependentError if the condition was written to since."""
        if self.mask._version != self.version:
            refuse("a mask was written to after rows had been selected by it", "write into a copy (mask.clone())")


class Meaning(Protocol):
    """What `Rows` asks of the one who traces them."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func(*args, **kwargs)` where some of the arguments are Rows."""

    def candidates_in_turn(self, rows: Rows) -> Iterator[Tensor]:
        """A loop over the rows."""

    def truth(self, value: Tensor) -> bool:
        """Which way a branch goes."""


@dataclass(eq=False)
class RowState:
    """What a tensor of rows is made of.

    `dense`: its values for all candidates, with their dim `dim`; equal rows are held once, for the dims `space` of the
    condition in which they differ. `coordinate`: the rows are the positions along that dim of the condition, as
    `nonzero` gives them; `is_matrix`: a column of positions per dim.
    """

    dense: Tensor
    dim: int
    space: tuple[int, ...]
    selection: Selection
    coordinate: int | None = None
    is_matrix: bool = False
    is_shared: bool = False  # another tensor of rows is a view of it, or it is one
    increment: Increment | None = None
    factors: tuple[Any, ...] | None = None  # rows and numbers of which these rows are the product
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.dense._version

    @property
    def is_waiting(self) -> bool:
        """Whether writes are in wait that the values do not have yet."""
        return self.increment is not None and self.increment.waiting > 0

    @property
    def is_unchanged(self) -> bool:
        """Whether the memory of the rows is as it was."""
        return self.dense._version == self.version

    def check_unchanged(self) -> None:
        """Raises DataDependentError if what the rows were taken of was written to since."""
        self.selection.check_unchanged()
        if not self.is_unchanged:
            refuse("a tensor was written to while rows taken of it were in use", "take the rows of a copy (x.clone())")


@dataclass(frozen=True, eq=False)
class Increment:
    """Rows that are those of `target[key]`, plus `delta`: to write them back is to add the latter.

    `waiting`: how many writes to the target were in wait when the rows were taken; if any, the rows' values are not
    what they are to be.
    """

    target: Tensor
    key: Any
    version: int
    waiting: int
    delta: Rows | None = None  # plus nothing, so far


class RowCount:
    """How many rows there are. It can be asked whether there are any, and serve as a size of a view of the rows."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def _any(self) -> Tensor:
        with below_torch_functions():
            return self._rows.state.selection.mask.any()

    def __eq__(self, other: object) -> Any:
        if isinstance(other, RowCount):
            return self._rows.state.selection is other._rows.state.selection or self._unknown()
        return ~self._any() if other == 0 else self._unknown()

    def __ne__(self, other: object) -> Any:
        return self._any() if other == 0 else self._unknown()

    def __gt__(self, other: object) -> Any:
        return self._any() if other == 0 else self._unknown()

    def __ge__(self, other: object) -> Any:
        return self._any() if other == 1 else self._unknown()

    def __lt__(self, other: object) -> Any:
        return ~self._any() if other == 1 else self._unknown()

    def __le__(self, other: object) -> Any:
        return ~self._any() if other == 0 else self._unknown()

    def __bool__(self) -> bool:
        return self._rows.meaning.truth(self._any())

    __hash__ = object.__hash__

    def _unknown(self, *_: object) -> NoReturn:
        refuse("the program computes with the number of selected rows, which depends on data")

    __index__ = __int__ = __float__ = __format__ = __str__ = _unknown
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _unknown
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __divmod__ = _unknown


class Rows(Tensor):
    """A tensor with a dim of selected rows; it has no values of its own, and every torch function asks its meaning."""

    state: RowState
    meaning: Meaning

    @staticmethod
    def of(state: RowState, meaning: Meaning) -> Rows:
        """The tensor that the program holds."""
        found: Rows = wrapper_tensor(Rows, state.dense)
        found.state, found.meaning = state, meaning
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return _first((args, kwargs)).meaning.call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the supertype's is a default that refuses
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        refuse(f"{func} is called on rows that data selects, below all that could tell what it does to each row")

    @property
    def shape(self) -> Any:  # type: ignore[override]  # a count that is unknown is no int
        """As of the tensor on one device, with a `RowCount` for the number of rows."""
        sizes: list[Any] = list(self.state.dense.shape)
        sizes[self.state.dim] = RowCount(self)
        return tuple(sizes)

    def size(self, dim: Any = None) -> Any:
        """`shape`, or one of its sizes."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> Any:
        """Can be asked whether it is zero."""
        return RowCount(self)

    def __len__(self) -> int:
        refuse("the program asks for the number of selected rows as a Python number, which depends on data")

    def __iter__(self) -> Iterator[Tensor]:
        return self.meaning.candidates_in_turn(self)

    def _values(self, *_: object, **__: object) -> NoReturn:
        refuse("the program reads selected rows as Python numbers, which depend on data")

    tolist = item = numpy = __bool__ = __index__ = __int__ = __float__ = __complex__ = __array__ = _values

    def _sized(self, name: str, sizes: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method that takes sizes: a number of these rows is one of them."""
        given = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
        candidates = self.state.dense.shape[self.state.dim]
        plain = [
            candidates if isinstance(size, RowCount) and size == self.shape[self.state.dim] else size for size in given
        ]
        return self.meaning.call(getattr(Tensor, name), (self, plain), kwargs)

    def view(self, *sizes: Any, **kwargs: Any) -> Any:
        """`Tensor.view`."""
        if sizes and isinstance(sizes[0], torch.dtype):
            return self.meaning.call(Tensor.view, (self, *sizes), kwargs)
        return self._sized("view", sizes, kwargs)

    def reshape(self, *sizes: Any, **kwargs: Any) -> Any:
        """`Tensor.reshape`."""
        return self._sized("reshape", sizes, kwargs)

    def expand(self, *sizes: Any, **kwargs: Any) -> Any:
        """`Tensor.expand`."""
        return self._sized("expand", sizes, kwargs)


def _first(arguments: Any) -> Rows:
    return next(leaf for leaf in torch.utils._pytree.tree_leaves(arguments) if isinstance(leaf, Rows))


def refuse_rows(values: Iterable[Tensor]) -> None:
    """Raise DataDependentError if any of the program's results are rows."""
    for value in values:
        if isinstance(value, Rows):
            where = value.state.selection.where
            raise DataDependentError("the shape of a result depends on data", where=where, fix=ADVICE)
