"""Where rows are taken from and written to: an indexing key with selected rows among its entries, in dense terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.capture.rows.selection import Rows, Selection, refuse
from autopar.torch_compat import unflatten


@dataclass(frozen=True)
class Place:
    """`base[dims ...]` by rows: the dims from `first` on are indexed by `indices`, one after the other."""

    base: Tensor
    first: int
    indices: tuple[Rows, ...]

    @property
    def selection(self) -> Selection:
        return self.indices[0].state.selection

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the indexed dims."""
        return tuple(self.base.shape[self.first : self.first + len(self.indices)])

    @property
    def coordinates(self) -> tuple[int, ...] | None:
        """The dims of the condition whose positions index, if that is all that does, each once and in whole."""
        found = [index.state.coordinate for index in self.indices]
        if any(dim is None for dim in found) or len(set(found)) < len(found):
            return None
        dims = tuple(dim for dim in found if dim is not None)
        return dims if self.sizes == tuple(self.selection.sizes[dim] for dim in dims) else None

    def is_same(self, other: Place) -> bool:
        """Whether another place of a tensor of this shape has the same elements, row by row."""
        states = [(mine.state, its.state) for mine, its in zip(self.indices, other.indices, strict=False)]
        same = [
            mine.dense is its.dense or (mine.coordinate is not None and mine.coordinate == its.coordinate)
            for mine, its in states
        ]
        forms = [(place.first, len(place.indices), id(place.selection), place.base.shape) for place in (self, other)]
        return forms[0] == forms[1] and all(same)


def place_of(base: Tensor, key: Any) -> Place:
    """What `base[key]` names, with everything but the rows applied already. Raises DataDependentError."""
    basic: list[Any] = []
    rows: list[Rows] = []
    dims: list[int] = []
    dim = 0  # of base[basic], so far
    for entry in _entries(key, base.dim()):
        if isinstance(entry, Rows):
            if entry.state.is_matrix or entry.state.dense.dim() != 1:
                refuse("selected rows of more than one dim are used as an index")
            basic.append(slice(None))
            rows.append(entry)
            dims.append(dim)
        elif isinstance(entry, Tensor) and entry.dim():
            refuse("selected rows and a tensor of indices are used together as an index")
        else:
            basic.append(int(entry) if isinstance(entry, Tensor) else entry)
        dim += not (isinstance(basic[-1], int) and not isinstance(basic[-1], bool))
    if any(index.state.selection is not rows[0].state.selection for index in rows):
        refuse("rows of two selections are used together as an index")
    if dims != list(range(dims[0], dims[0] + len(dims))):
        refuse("selected rows index dims that are apart", "index one after the other: x[:, index], x[index]")
    plain = all(isinstance(entry, slice) and entry == slice(None) for entry in basic)
    return Place(base if plain else base[tuple(basic)], dims[0], tuple(rows))


def _entries(key: Any, rank: int) -> list[Any]:
    """The entries of a key without an ellipsis; an entry per dim that it names."""
    entries = list(key) if isinstance(key, (tuple, list)) else [key]
    marks = [index for index, entry in enumerate(entries) if entry is Ellipsis]
    if marks:
        named = sum(entry is not None and entry is not Ellipsis for entry in entries)
        entries[marks[0] : marks[0] + 1] = [slice(None)] * (rank - named)
    return entries


def spread(dense: Tensor, dim: int, space: tuple[int, ...], target: tuple[int, ...], selection: Selection) -> Tensor:
    """Rows that differ in the dims `space` of the condition, held for the dims `target`, which are more."""
    if space == target:
        return dense
    sizes = [selection.sizes[other] if other in space else 1 for other in target]
    split = unflatten(dense, dim, sizes)
    full = [*dense.shape[:dim], *(selection.sizes[other] for other in target), *dense.shape[dim + 1 :]]
    return split.expand(full).flatten(dim, dim + len(target) - 1)


def apart(dense: Tensor, dim: int, space: Sequence[int], order: Sequence[int], selection: Selection) -> Tensor:
    """Rows with a dim for each dim of the condition that is in `space`, in the given order of these."""
    split = unflatten(dense, dim, [selection.sizes[other] for other in space])
    places = [dim + list(space).index(other) for other in order]
    return split.permute(*range(dim), *places, *range(dim + len(space), split.dim()))


def taken(place: Place) -> tuple[Tensor, tuple[int, ...]]:
    """(the rows at a place for all candidates, along the place's first dim; the dims of the condition that matter)."""
    order = place.coordinates
    if order is not None:
        space = place.selection.ordered(order)
        places = [place.first + order.index(dim) for dim in space]
        rest = range(place.first + len(order), place.base.dim())
        turned = place.base if space == order else place.base.permute(*range(place.first), *places, *rest)
        if len(order) == 1:  # an alias: what is done to these rows is not done to the tensor
            alias: Tensor = torch.ops.aten.alias(turned)
            return alias, space
        return turned.flatten(place.first, place.first + len(order) - 1), space
    space, indices = dense_indices(place)
    return place.base[(slice(None),) * place.first + tuple(indices)], space


def dense_indices(place: Place) -> tuple[tuple[int, ...], list[Tensor]]:
    """(the dims of the condition in which they differ, the indices of all candidates): 0 where one is no row."""
    space = place.selection.ordered({dim for index in place.indices for dim in index.state.space})
    if any(index.state.coordinate is None for index in place.indices):
        space = place.selection.dims
    found = []
    for index in place.indices:
        state = index.state
        dense = spread(state.dense, 0, state.space, space, place.selection)
        if state.coordinate is None:
            dense = torch.where(place.selection.mask_along(space), dense, 0)
        found.append(dense)
    return space, found
