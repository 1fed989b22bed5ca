"""Products whose contracted dim is sharded: the bias is added on one rank only."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.sharding.rules.matmul import BIAS_ONCE

aten = torch.ops.aten
UNBIASED = {
    "aten.addmm.default": aten.mm.default,
    "aten.baddbmm.default": aten.bmm.default,
    "aten.addmv.default": aten.mv.default,
}


def holds_bias(local: LocalCall) -> bool:
    """Whether this rank is the one that adds the bias."""
    return all(local.geometry.coordinates[axis] == 0 for axis in local.axes_with(BIAS_ONCE))


def biased_product(local: LocalCall) -> LocalValue:
    """(bias, left, right)."""
    if holds_bias(local):
        return local.plain()
    return local.build.op(UNBIASED[local.call.name], *local.args[1:3])


FORMS: Mapping[str, LocalForm] = dict.fromkeys(UNBIASED, biased_product)
