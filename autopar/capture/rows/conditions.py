"""Where rows begin: conditions on values of tensors, and the branches and loops that data decides."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture.recorder import Recorder, node_of
from autopar.capture.rows.branches import Branch, Branches, Lines, branch_at, loop_at, users_frame
from autopar.capture.rows.equal_values import EqualValues, Name, storages_of
from autopar.capture.rows.masks import Masks, any_of
from autopar.capture.rows.places import spread
from autopar.capture.rows.selection import Meaning, Rows, RowState, Selection, refuse
from autopar.errors import DataDependentError
from autopar.source import calling_line, describe
from autopar.torch_compat import DataDependentOutputException, DynamicOutputShapeException

Function = Callable[..., Any]


def are_in(arguments: Any) -> bool:
    """Whether any of the tensors are rows."""
    return any(isinstance(leaf, Rows) for leaf in pytree.tree_leaves(arguments))


class Conditions:
    """Makes selections and positions of conditions; `meaning` is who traces the rows that begin here."""

    def __init__(self, recorder: Recorder, meaning: Meaning) -> None:
        self._nodes, self._meaning = recorder.nodes, meaning
        self.equal = EqualValues(recorder.nodes)
        self.masks = Masks(recorder.known_value, self.equal.is_written)
        self.branches = Branches()
        self.is_asking = False  # a function is run as it is, to see whether it can
        self._selections: dict[Name, Selection] = {}
        self._first_branch: Branch | None = None

    @property
    def have_begun(self) -> bool:
        """Whether there can be rows."""
        return bool(self._selections)

    def known(self, func: Function, *args: Any, **kwargs: Any) -> Any:
        """The function's own result, if it can be told; else NotImplemented."""
        self.is_asking = True
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return NotImplemented
        finally:
            self.is_asking = False

    def nonzero(self, condition: Tensor) -> Any:
        """`torch.nonzero`: a matrix with a column of positions per dim."""
        found = self.known(torch.argwhere, condition)
        if found is not NotImplemented:
            return found
        selection = self._selection(condition)
        states = [item.state for item in self.positions(selection)]
        columns = [spread(item.dense, 0, item.space, selection.dims, selection) for item in states]
        dense = torch.stack(columns, 1)
        return Rows.of(RowState(dense, 0, selection.dims, selection, is_matrix=True), self._meaning)

    def where(self, condition: Tensor) -> Any:
        """`torch.where`: the positions along each dim."""
        found = self.known(torch.where, condition)
        return self.positions(self._selection(condition)) if found is NotImplemented else found

    def positions(self, selection: Selection) -> tuple[Rows, ...]:
        """Of the rows, along each dim of the condition."""
        states = []
        for dim, size in enumerate(selection.sizes):
            numbers = torch.arange(size, device=selection.mask.device)
            states.append(RowState(numbers, 0, (dim,), selection, coordinate=dim))
        return tuple(Rows.of(state, self._meaning) for state in states)

    def _selection(self, condition: Tensor) -> Selection:
        """One for all conditions that are equal."""
        name = self.equal.name(node_of(condition))
        if name not in self._selections:
            line = calling_line()
            with torch.no_grad():
                mask = condition if condition.dtype is torch.bool else condition != 0
            where = describe(*line) if line else ""
            self._selections[name] = Selection(mask, condition, where, mask._version)
        return self._selections[name]

    def with_positions(self, key: Any) -> Any:
        """A key with each mask of unknown values replaced by the positions where it holds."""
        entries = list(key) if isinstance(key, (tuple, list)) else [key]
        found: list[Any] = []
        for entry in entries:
            is_mask = isinstance(entry, Tensor) and not isinstance(entry, Rows) and entry.dtype is torch.bool
            positions = self.where(entry) if is_mask and entry.dim() else (entry,)
            found.extend(positions if are_in(positions) else (entry,))
        return tuple(found) if are_in(found) else key

    # Branches and loops

    def names(self, selection: Selection) -> set[Hashable]:
        """What a branch can be about that is taken wherever this selection has rows."""
        condition = node_of(selection.condition)
        labels = self.masks.labels(condition)
        names: set[Hashable] = {self.equal.name(node) for node in (condition, node_of(selection.mask))}
        return names | ({labels.table} if labels is not None else set())

    def truth(self, value: Tensor) -> bool:
        """Which way a branch goes that data decides: into it, masked. Raises DataDependentError."""
        frame = users_frame()
        branch = None if frame is None else branch_at(frame)
        if frame is None or branch is None:
            refuse(
                "the program's control flow depends on data (the truth of a tensor)",
                "compute the choice with torch.where, or decide it outside the model",
            )
        way, lines = branch
        about = any_of(node_of(value))
        name = None if about is None else self.equal.name(about)
        with torch.no_grad():
            holds = (value != 0).reshape(())
            self._enter(Branch(frame, lines, holds if way else ~holds, len(self._nodes), name))
        return way

    def turns(self, rows: Rows) -> Iterator[Tensor]:
        """All positions, one after the other, each in a branch that holds where it is a row."""
        frame, state = users_frame(), rows.state
        lines = None if frame is None else loop_at(frame)
        of_one_dim = len(state.selection.sizes) == 1 and (state.is_matrix or state.coordinate is not None)
        if frame is None or lines is None or not of_one_dim:
            refuse("the program loops over selected rows", "loop over all experts: for expert in range(num_experts)")
        return self._turns(state, frame, lines)

    def _turns(self, state: RowState, frame: FrameType, lines: Lines) -> Iterator[Tensor]:
        mask, condition = state.selection.mask, node_of(state.selection.condition)
        table: fx.Node | None = self.masks.occupied(condition)
        for position in range(self.masks.reachable(condition, mask.shape[0])):
            with torch.no_grad():
                predicate = mask[position]
            about = None if table is None else (table, position)
            self._enter(Branch(frame, lines, predicate, len(self._nodes), about))
            yield torch.tensor([position] if state.is_matrix else position, device=mask.device)
        self.branches.leave(frame, lines)

    def _enter(self, branch: Branch) -> None:
        self._first_branch = self._first_branch or branch
        self.branches.enter(branch)

    def check_reassigned(self, values: Iterable[Tensor]) -> None:
        """Raises DataDependentError if any was made since the first branch that data decides."""
        branch = self._first_branch
        made = set() if branch is None else set(self._nodes[branch.start :])
        if branch is not None and any(node_of(value) in made for value in values):
            where = describe(branch.frame.f_code.co_filename, branch.lines[0], branch.frame.f_code.co_name)
            raise DataDependentError(
                "a buffer is set anew in a program with a branch that data decides, or after it",
                where=where,
                fix="write into the buffer in place (self.count.copy_(...)), outside of the branch",
            )

    def check_write(self, written: Tensor) -> None:
        """An op writes into a tensor as a whole: in a branch that data decides, it must have been made there.

        Raises DataDependentError.
        """
        for branch in self.branches.current():
            values = pytree.tree_leaves([node.meta.get("val") for node in self._nodes[: branch.start]])
            before = storages_of(value for value in values if isinstance(value, Tensor))
            if not before.isdisjoint(storages_of([written])):
                refuse("in a branch that data decides, a tensor from outside it is written to as a whole")
