"""Look-ups along a sharded dim: what another rank holds reads as zeros, so the ranks' results sum to the whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.passes.local_forms.ranges import append_dims, clear, shift_into_range
from autopar.sharding.rules.indexing import PICKED, Indexed
from autopar.sharding.rules.placing import wrap_dim

aten = torch.ops.aten


def own_indices(local: LocalCall, index: fx.Node, dim: int) -> tuple[fx.Node, fx.Node]:
    """(index within this rank's range, 0 where it lies outside; mask of those outside)."""
    offsets, lengths = local.input_chunk(0)
    shifted, outside = shift_into_range(local.build, index, offsets[dim], lengths[dim])
    return clear(local.build, shifted, outside), outside


def gather(local: LocalCall) -> LocalValue:
    """(self, dim, index)."""
    if not local.axes_with(PICKED):
        return local.plain()
    source, dim, index, *rest = local.args
    own, outside = own_indices(local, index, wrap_dim(dim, len(local.call.inputs[0].shape)))
    return clear(local.build, local.build.op(aten.gather.default, source, dim, own, *rest), outside)


def index_select(local: LocalCall) -> LocalValue:
    """(self, dim, index)."""
    if not local.axes_with(PICKED):
        return local.plain()
    source, dim, index = local.args
    rank = len(local.call.inputs[0].shape)
    picked = wrap_dim(dim, rank)
    own, outside = own_indices(local, index, picked)
    found = local.build.op(aten.index_select.default, source, dim, own)
    return clear(local.build, found, append_dims(local.build, outside, rank - 1 - picked))


def index(local: LocalCall) -> LocalValue:
    """(self, indices) with one index tensor; negative indices count from the end."""
    if not local.axes_with(PICKED):
        return local.plain()
    source, indices = local.args
    geometry = Indexed(local.call.inputs[0], local.call.args[1])
    dim = geometry.positions[0]
    wrapped = local.build.op(aten.remainder.Scalar, indices[dim], local.call.inputs[0].shape[dim])
    own, outside = own_indices(local, wrapped, dim)
    found = local.build.op(local.call.target, source, [*indices[:dim], own, *indices[dim + 1 :]])
    return clear(local.build, found, append_dims(local.build, outside, geometry.rank - 1 - dim))


FORMS: Mapping[str, LocalForm] = {
    "aten.gather.default": gather,
    "aten.index_select.default": index_select,
    "aten.index.Tensor": index,
    "aten._unsafe_index.Tensor": index,
}
