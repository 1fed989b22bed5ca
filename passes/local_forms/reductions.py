"""Means over a sharded dim."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import fx

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.sharding.rules.placing import wrap_dim, wrap_dims
from autopar.sharding.rules.reductions import MEAN, PREFIX

aten = torch.ops.aten


def mean(local: LocalCall) -> LocalValue:
    """The local mean times the share of the elements that lie here: addends of the mean."""
    node = local.plain()
    if not local.axes_with(MEAN):
        return node
    whole, here = local.call.inputs[0].shape, local.input_chunk(0)[1]
    reduced = wrap_dims(local.call.argument(1, "dim"), len(whole))
    share = prod(here[dim] for dim in reduced) / prod(whole[dim] for dim in reduced)
    return local.build.op(aten.mul.Scalar, node, share)


def cumsum(local: LocalCall) -> LocalValue:
    """The local running sum plus the totals of the ranks before this one, innermost axis first."""
    running = local.plain()
    axes = local.axes_with(PREFIX)
    if not axes:
        return running
    build, dim = local.build, local.args[1]
    total = build.op(aten.sum.dim_IntList, local.args[0], [dim], True, dtype=running.meta["val"].dtype)
    for axis in reversed(axes):
        totals = _totals(local, total, axis)
        before = build.op(aten.slice.Tensor, totals, dim, 0, local.geometry.coordinates[axis])
        running = build.op(aten.add.Tensor, running, build.op(aten.sum.dim_IntList, before, [dim], True))
        total = build.op(aten.sum.dim_IntList, totals, [dim], True)
    return running


def _totals(local: LocalCall, total: fx.Node, axis: int) -> fx.Node:
    """Every rank's total, side by side along the summed dim: each rank puts its own into zeros."""
    rank = len(local.call.inputs[0].shape)
    here, ranks = local.geometry.coordinates[axis], local.geometry.mesh_shape[axis]
    padding = [0, 0] * (rank - 1 - wrap_dim(local.args[1], rank)) + [here, ranks - 1 - here]
    return local.build.all_reduce(local.build.op(aten.constant_pad_nd.default, total, padding), axis)


FORMS: Mapping[str, LocalForm] = {"aten.mean.default": mean, "aten.mean.dim": mean, "aten.cumsum.default": cumsum}
