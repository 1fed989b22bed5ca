"""Blocks of attention: a rank's queries against keys of which it holds some, and what merges the results exactly.

A block gives (out, lse): the attention over its keys alone, and the log-sum-exp of its scores, minus infinity for a
query that has no key in it. With lse over all keys, the attention over all is the sum of exp(lse_block - lse) * out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar.passes.local_call import GraphBuilder, LocalCall
from autopar.passes.local_forms.ranges import clear
from autopar.passes.ring import passed_on
from autopar.sharding.layout import local_chunk

aten = torch.ops.aten
LENGTH_DIM, KEYS_DIM = 2, 3  # of q, k, v and of the rows of a mask; of the columns of a mask
NOTHING = float("-inf")  # the log-sum-exp of no key at all
Result = tuple[fx.Node, fx.Node]  # out and lse
Coordinates = tuple[int, ...]


def moved(at: Coordinates, axis: int, steps: int, mesh_shape: Sequence[int]) -> Coordinates:
    """`steps` further along the ring of an axis."""
    return (*at[:axis], (at[axis] + steps) % mesh_shape[axis], *at[axis + 1 :])


@dataclass(frozen=True)
class Block:
    """Scores of a stretch of queries against a stretch of keys."""

    row: int
    rows: int
    column: int
    columns: int
    is_causal: bool

    @property
    def skipped(self) -> int:
        """Leading rows that causality leaves without a key here."""
        return min(self.rows, max(0, self.column - self.row)) if self.is_causal else 0

    @property
    def forbids(self) -> bool:
        """Whether causality forbids a score of the other rows."""
        return self.is_causal and self.row + self.skipped < self.column + self.columns - 1


@dataclass(frozen=True)
class Attention:
    """One attention of this rank's queries, or its backward. `query`: the position of q; k and v follow."""

    local: LocalCall
    query: int
    args: tuple[Any, ...]  # with the keys and values that `holder` holds
    holder: Coordinates

    @property
    def mask_at(self) -> int:
        return len(self.args) - 8

    @property
    def mask(self) -> fx.Node | None:
        mask: fx.Node | None = self.args[self.mask_at]
        return mask

    @cached_property
    def keys(self) -> tuple[int, int]:
        """(offset, length) of the keys along the sequence."""
        shape, layout = self.local.call.inputs[self.query + 1].shape, self.local.strategy.inputs[self.query + 1]
        offsets, lengths = local_chunk(shape, layout, self.local.geometry.mesh_shape, self.holder)
        return offsets[LENGTH_DIM], lengths[LENGTH_DIM]

    @cached_property
    def block(self) -> Block:
        offsets, lengths = self.local.input_chunk(self.query)
        row, column = self.args[-2][2] + offsets[LENGTH_DIM], self.args[-2][3] + self.keys[0]
        return Block(row, lengths[LENGTH_DIM], column, self.keys[1], bool(self.args[self.mask_at + 3]))

    def turned(self, axis: int) -> Attention:
        """The same queries against the keys that the rank before this one along `axis` holds, which come here."""
        following = self.at(moved(self.holder, axis, -1, self.local.geometry.mesh_shape))
        own = self.args[self.query + 1 : self.query + 3]
        keys = passed_on(self.local.build, own, axis, LENGTH_DIM, following.keys[1])
        return self._of(following.holder, keys)

    def at(self, holder: Coordinates) -> Attention:
        """As if the keys were those of another rank."""
        return replace(self, holder=holder)

    def _of(self, holder: Coordinates, keys: Sequence[fx.Node]) -> Attention:
        args = [*self.args[: self.query + 1], *keys, *self.args[self.query + 3 :]]
        return replace(self, args=tuple(args), holder=holder)

    @cached_property
    def own_mask(self) -> fx.Node | None:
        """The mask of the block, without the rows that are skipped; it forbids what causality forbids too."""
        mask, (start, length) = self.mask, self.keys
        if mask is None:
            return None
        build, block = self.local.build, self.block
        if mask.meta["val"].shape[KEYS_DIM] not in (1, length):  # beside a ring, it has the columns of all keys
            mask = build.op(aten.slice.Tensor, mask, KEYS_DIM, start, start + length)
        mask = self._other_rows(mask)
        return self._causal(mask) if block.forbids else mask

    def _causal(self, mask: fx.Node) -> fx.Node:
        build, block, device = self.local.build, self.block, mask.meta["val"].device
        rows = build.op(aten.arange.start, block.row + block.skipped, block.row + block.rows, device=device)
        columns = build.op(aten.arange.start, block.column, block.column + block.columns, device=device)
        if mask.meta["val"].dtype == torch.bool:
            allowed = build.op(aten.ge.Tensor, build.op(aten.unsqueeze.default, rows, 1), columns)
            return build.op(aten.bitwise_and.Tensor, mask, allowed)
        forbidden = build.op(aten.lt.Tensor, build.op(aten.unsqueeze.default, rows, 1), columns)
        return build.op(aten.where.ScalarSelf, forbidden, NOTHING, mask)

    def _other_rows(self, value: fx.Node) -> fx.Node:
        """The rows that are not skipped; one row for all stays."""
        if not self.block.skipped or value.meta["val"].shape[LENGTH_DIM] < self.block.rows:
            return value
        return self.local.build.op(aten.slice.Tensor, value, LENGTH_DIM, self.block.skipped, self.block.rows)

    def _with_skipped_rows(self, value: fx.Node, number: float = 0.0) -> fx.Node:
        """A result with `number` in the rows that were skipped."""
        if not self.block.skipped:
            return value
        padding = [0, 0] * (value.meta["val"].dim() - 1 - LENGTH_DIM) + [self.block.skipped, 0]
        return self.local.build.op(aten.constant_pad_nd.default, value, padding, number)

    def plain(self) -> fx.Node:
        """The op as it stands, at its offset."""
        args, block = list(self.args), self.block
        (batch, head, *_), _ = self.local.input_chunk(self.query)
        args[-2] = [args[-2][0] + batch, args[-2][1] + head, block.row, block.column]
        return self.local.build.op(self.local.call.target, *args)

    def _call(self) -> fx.Node:
        """The op on the block: on rows that have keys in it, at its offset."""
        args, block = list(self.args), self.block
        (batch, head, *_), _ = self.local.input_chunk(self.query)
        args[-2] = [args[-2][0] + batch, args[-2][1] + head, block.row + block.skipped, block.column]
        args[self.mask_at] = self.own_mask
        args[self.mask_at + 3] = block.forbids and self.mask is None
        for index in (0,) if self.query == 0 else (0, 1, 4, 5):  # q; grad_out, q, out, lse
            args[index] = self._other_rows(args[index])
        return self.local.build.op(self.local.call.target, *args)

    def result(self) -> Result | None:
        """(out, lse) of the block; None where no query has a key in it."""
        if self.block.skipped == self.block.rows:
            return None
        build, node = self.local.build, self._call()
        out, lse = self.local.output(node, 0), self.local.output(node, 1)
        mask = self.own_mask
        if mask is not None:  # kernels differ in what they return for a row without keys
            empty = _empty_rows(build, mask)
            lse = clear(build, lse, empty, NOTHING)
            out = clear(build, out, build.op(aten.unsqueeze.default, empty, -1))
        return self._with_skipped_rows(out), self._with_skipped_rows(lse, NOTHING)

    def gradients(self) -> tuple[fx.Node, fx.Node, fx.Node] | None:
        """What the block adds to the gradients of q, k and v, with lse over all keys; None where it adds nothing."""
        if self.block.skipped == self.block.rows:
            return None
        node = self._call()
        of_q, of_k, of_v = (self.local.output(node, index) for index in range(3))
        return self._with_skipped_rows(of_q), of_k, of_v


def _empty_rows(build: GraphBuilder, mask: fx.Node) -> fx.Node:
    """Where a mask leaves a query without a key, without the dim of the keys."""
    if mask.meta["val"].dtype == torch.bool:
        return build.op(aten.bitwise_not.default, build.op(aten.any.dim, mask, KEYS_DIM))
    return build.op(aten.eq.Scalar, build.op(aten.amax.default, mask, [KEYS_DIM]), NOTHING)


def finite(build: GraphBuilder, lse: fx.Node) -> fx.Node:
    """lse, 0 for a query without any key: what the op itself returns there."""
    return clear(build, lse, build.op(aten.eq.Scalar, lse, NOTHING))


def scaled(build: GraphBuilder, out: fx.Node, lse: fx.Node, whole: fx.Node) -> fx.Node:
    """A block's share of the attention whose log-sum-exp is `whole`, in the precision of lse."""
    share = build.op(aten.exp.default, build.op(aten.sub.Tensor, lse, whole))
    return build.op(aten.mul.Tensor, out, build.op(aten.unsqueeze.default, share, -1))


def merged(build: GraphBuilder, one: Result, other: Result) -> Result:
    """Two blocks of the same queries as one."""
    lse = build.op(aten.logaddexp.default, one[1], other[1])
    whole = finite(build, lse)
    parts = (scaled(build, *block, whole) for block in (one, other))
    return build.op(aten.add.Tensor, *parts), lse


def merged_over_axes(build: GraphBuilder, axes: Sequence[int], block: Result) -> Result:
    """Addends of the attention over the keys of all ranks of the axes, and its log-sum-exp."""
    out, lse = block
    top = lse
    for axis in axes:
        top = build.all_reduce(top, axis, "max")
    top = finite(build, top)
    total = build.op(aten.exp.default, build.op(aten.sub.Tensor, lse, top))
    for axis in axes:
        total = build.all_reduce(total, axis)
    whole = build.op(aten.add.Tensor, build.op(aten.log.default, total), top)
    return scaled(build, out, lse, finite(build, whole)), whole
