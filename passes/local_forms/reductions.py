"""Means over a sharded dim."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.sharding.rules.placing import wrap_dims
from autopar.sharding.rules.reductions import MEAN

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


FORMS: Mapping[str, LocalForm] = {"aten.mean.default": mean, "aten.mean.dim": mean}
