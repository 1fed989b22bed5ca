"""Rows written back: those that are selected, in the branches that are taken, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autopar.capture.recorder import node_of
from autopar.capture.rows.branches import Branches
from autopar.capture.rows.layers import Layers
from autopar.capture.rows.masks import Masks
from autopar.capture.rows.places import Place, apart, dense_indices, spread
from autopar.capture.rows.selection import Rows, Selection, refuse


class Writes:
    """Writes rows to places, masked."""

    def __init__(
        self, branches: Branches, layers: Layers, masks: Masks, about: Callable[[Selection], Collection[Hashable]]
    ) -> None:
        self._branches, self._layers, self._masks, self._about = branches, layers, masks, about
        self.is_writing = False
        self._masked: Counter[str] = Counter()  # writes of rows that are no experts, by the line that selects them

    def notes(self) -> tuple[str, ...]:
        """What a plan has to say of rows that are computed whether they are selected or not."""
        return tuple(
            f"{where}: what is computed of the rows selected here is no expert of a known form: it is computed of all "
            f"rows {count} times, and masked, whatever is selected"
            for where, count in self._masked.items()
        )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self.is_writing = True
        try:
            yield
        finally:
            self.is_writing = False

    def _mask(self, place: Place) -> Tensor:
        """Where there are rows that the program on one device writes now; the selection's own where no branch tells."""
        place.selection.check_unchanged()
        mask = place.selection.mask
        implied = self._about(place.selection)
        with torch.no_grad():
            for branch in self._branches.current():
                if branch.about is None or branch.about not in implied:
                    mask = mask & branch.predicate
        return mask

    def _is_taken(self, place: Place, values: Any, *, is_sum: bool, alpha: float = 1) -> bool:
        """Whether an op for all experts will write these rows."""
        if isinstance(values, Rows) and alpha == 1:
            mask = self._mask(place)
            is_whole = mask is place.selection.mask
            with self._writing():
                if self._layers.offer(place, values, mask, is_whole=is_whole, is_sum=is_sum):
                    return True
        self._layers.flush_for([place.base])
        if isinstance(values, Rows):
            self._masked[place.selection.where] += 1
        return False

    def is_certain(self, place: Place) -> bool:
        """Whether no two rows go to one place."""
        order = place.coordinates
        others = [] if order is None else [dim for dim in place.selection.dims if dim not in order]
        return order is not None and (
            not others or self._masks.are_distinct(node_of(place.selection.condition), others)
        )

    def put(self, place: Place, value: Any) -> None:
        """`base[place] = value`. Raises DataDependentError where two rows may go to one place."""
        order = place.coordinates
        if order is None or not self.is_certain(place):
            refuse(
                "selected rows are written to places of which two may be the same",
                "add them up with index_add_, or write to all dims of the mask: out[mask] = ...",
            )
        values = self._values(place, value)
        if self._is_taken(place, values, is_sum=False):
            return
        mask, added = self._by_place(place, order, values)
        with self._writing():
            place.base.copy_(torch.where(mask, added, place.base))

    def _by_place(self, place: Place, order: tuple[int, ...], values: Any) -> tuple[Tensor, Any]:
        """(where there is a row, in the dims of the base; the sum of the rows there, or the one value of all)."""
        others = tuple(dim for dim in place.selection.dims if dim not in order)
        dims = tuple(range(len(order), len(order) + len(others)))
        mask = self._mask(place).permute(*order, *others)
        behind = place.base.dim() - place.first - len(order)
        if isinstance(values, Rows):
            rows = self._by_dims(place, values, (*order, *others))
            values = torch.where(mask.reshape(*mask.shape, *([1] * behind)), rows, 0)
            values = values.sum([place.first + dim for dim in dims]) if dims else values
        elif isinstance(values, Tensor):
            values = values.to(place.base.dtype)
        mask = mask.flatten(len(order)).any(-1) if dims else mask
        return mask.reshape(*mask.shape, *([1] * behind)), values

    def add(self, place: Place, value: Any, *, alpha: float = 1) -> None:
        """Add rows to a place, as often as they go there."""
        values = self._values(place, value)
        if not isinstance(values, Rows):
            refuse("a value that is no rows is added to selected rows")
        if self._is_taken(place, values, is_sum=True, alpha=alpha):
            return
        order = place.coordinates
        if order is None:
            self._add_by_index(place, values, alpha)
            return
        _, added = self._by_place(place, order, values)
        with self._writing():
            place.base.add_(added, alpha=alpha)

    def _add_by_index(self, place: Place, values: Rows, alpha: float) -> None:
        space, indices = dense_indices(place)
        state = values.state
        full = spread(state.dense, state.dim, state.space, place.selection.dims, place.selection)
        indices = [spread(index, 0, space, place.selection.dims, place.selection) for index in indices]
        mask = place.selection.mask_along(place.selection.dims, self._mask(place))
        shape = [1] * full.dim()
        shape[state.dim] = -1
        full = torch.where(mask.reshape(shape), full, 0).to(place.base.dtype)
        with self._writing():
            if len(indices) == 1:
                place.base.index_add_(place.first, indices[0], full, alpha=alpha)
            else:
                key = [None] * place.first + indices
                place.base.index_put_(key, full * alpha, accumulate=True)

    def _values(self, place: Place, value: Any) -> Any:
        """The value, whose rows must be those of the place."""
        if not isinstance(value, Rows):
            after = place.base.dim() - place.first - len(place.indices)
            if isinstance(value, Tensor) and value.dim() > after:
                refuse("a tensor with a number of rows of its own is written to selected rows")
            return value
        state = value.state
        state.check_unchanged()
        if state.selection is not place.selection:
            refuse("rows of one selection are written to the places of another")
        behind = place.base.dim() - place.first - len(place.indices)
        if state.dense.dim() - state.dim - 1 != behind:
            refuse("selected rows are written to places of another number of dims")
        return value

    def _by_dims(self, place: Place, values: Rows, order: tuple[int, ...]) -> Tensor:
        """The values with a dim per dim of the condition, in that order, at the place's first, as the base's dtype."""
        state = values.state
        space = place.selection.dims
        full = spread(state.dense, state.dim, state.space, space, place.selection)
        found = apart(full, state.dim, space, order, place.selection).to(place.base.dtype)
        missing = place.first - state.dim
        return found[(None,) * missing] if missing > 0 else found
