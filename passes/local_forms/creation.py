"""Sequences of which each rank makes its own part."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.sharding.rules.creation import OFFSET

aten = torch.ops.aten


def arange(local: LocalCall) -> LocalValue:
    """(end), (start, end) or (start, end, step), in integers."""
    if not local.axes_with(OFFSET):
        return local.plain()
    start, _, step = (*local.args, 1)[:3] if len(local.args) > 1 else (0, local.args[0], 1)
    (skipped,), (count,) = local.output_chunk()
    first = start + skipped * step
    return local.build.op(aten.arange.start_step, first, first + count * step, step, **local.kwargs)


FORMS: Mapping[str, LocalForm] = {
    "aten.arange.default": arange,
    "aten.arange.start": arange,
    "aten.arange.start_step": arange,
}
