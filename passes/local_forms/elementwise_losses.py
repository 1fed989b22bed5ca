"""Averaged losses: the local mean times the share of the elements that lie here."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.sharding.rules.elementwise_losses import BACKWARD_REDUCTION_AT, REDUCTION_AT, SHARE, broadcast

aten = torch.ops.aten


def share_of_mean(local: LocalCall) -> LocalValue:
    """The op on the shards, scaled: addends of the mean, or gradients of the mean over all ranks."""
    node = local.plain()
    if not local.axes_with(SHARE):
        return node
    specs = local.call.inputs
    whole = broadcast(*(spec.shape for spec in specs))
    here = broadcast(*(_stretched(spec.shape, local.input_chunk(index)[1], whole) for index, spec in enumerate(specs)))
    return local.build.op(aten.mul.Scalar, node, prod(here) / prod(whole))


def _stretched(shape: tuple[int, ...], here: tuple[int, ...], whole: tuple[int, ...]) -> tuple[int, ...]:
    """The local sizes of an operand, one where it is broadcast."""
    behind = whole[len(whole) - len(shape) :]
    return tuple(size if full == out else 1 for size, full, out in zip(here, shape, behind, strict=True))


FORMS: Mapping[str, LocalForm] = dict.fromkeys((*REDUCTION_AT, *BACKWARD_REDUCTION_AT), share_of_mean)
