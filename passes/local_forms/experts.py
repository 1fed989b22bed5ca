"""Experts and groups on shards: which of them a rank has, which of the rows, and who adds the bias of the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import fx

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.sharding.rules.experts import DOWN_BIAS, INSIDE, OWN_EXPERTS, OWN_ROWS, UP

aten = torch.ops.aten
FIRST = DOWN_BIAS + 2  # the argument after the activation


def experts(start: int, local: LocalCall) -> LocalValue:
    """The op whose layer begins at argument `start`."""
    args = list(local.args)
    if local.axes_with(OWN_EXPERTS):
        tensors = [index for index, value in enumerate(args) if index <= start + UP and value is not None]
        args[start + FIRST] += local.input_chunk(len(tensors) - 1)[0][0]
    if any(local.geometry.coordinates[axis] for axis in local.axes_with(INSIDE)):
        args[start + DOWN_BIAS] = None
    return local.build.op(local.call.target, *args)


def local_ends(local: LocalCall) -> fx.Node:
    """Where the groups end within this rank's rows."""
    (start, *_), (length, *_) = local.input_chunk(0)
    ends = local.build.op(aten.sub.Tensor, local.args[2], start)
    return local.build.op(aten.clamp.default, ends, 0, length)


def grouped_mm(local: LocalCall) -> LocalValue:
    """(rows, matrices, ends, first)."""
    rows, matrices, ends, first = local.args
    if local.axes_with(OWN_ROWS):
        ends = local_ends(local)
    return local.build.op(local.call.target, rows, matrices, ends, first + local.input_chunk(1)[0][0])


def grouped_outer(local: LocalCall) -> LocalValue:
    """(left, right, ends, first, count)."""
    left, right, ends, first, _ = local.args
    if local.axes_with(OWN_ROWS):
        ends = local_ends(local)
    starts, lengths = local.output_chunk()
    return local.build.op(local.call.target, left, right, ends, first + starts[0], lengths[0])


FORMS: Mapping[str, LocalForm] = {
    "autopar.grouped_mm.default": grouped_mm,
    "autopar.grouped_outer.default": grouped_outer,
    "autopar.experts.default": partial(experts, 0),
    "autopar.experts_backward.default": partial(experts, 1),
}
