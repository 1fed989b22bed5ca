"""Ops with the size of their result among the arguments: it becomes the size of this rank's shard."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.sharding.rules.placing import names
from autopar.torch_compat import without_dispatch

aten = torch.ops.aten

# ops by the position of the size of the result; a keyword `size` is not used for these in traced graphs
SIZE_POSITIONS: dict[str, int] = {
    **dict.fromkeys(
        names("""
            aten.full.default aten.zeros.default aten.ones.default aten.empty.memory_format
        """),
        0,
    ),
    **dict.fromkeys(
        names("""
            aten.expand.default aten.expand_copy.default aten.new_zeros.default aten.new_ones.default
            aten.new_full.default aten.new_empty.default
            aten.select_backward.default aten.unfold_backward.default aten.diagonal_backward.default
        """),
        1,
    ),
}
# reshapes: their local result is a view of the shard in the local size, whatever the arguments were
RESHAPES = names("""
    aten.view.default aten._unsafe_view.default aten.view_copy.default aten._reshape_alias.default
    aten._reshape_copy.default aten.squeeze.default aten.squeeze.dim aten.squeeze.dims aten.squeeze_copy.default
    aten.squeeze_copy.dim
""")


def sized(local: LocalCall) -> LocalValue:
    """The op, with the local size of its result."""
    position = SIZE_POSITIONS[local.call.name]
    size = list(local.output_chunk()[1])
    args = (*local.args[:position], size, *local.args[position + 1 :])
    return local.build.op(local.call.target, *args, **local.kwargs)


def reshape(local: LocalCall) -> LocalValue:
    """A view of the shard; a copy first where its strides do not allow one.

    As `reshape`: on a device, strides may differ from those that were foreseen, and then it copies.
    """
    source: fx.Node = local.args[0]
    size = list(local.output_chunk()[1])
    if not _can_view(source, size):
        source = local.build.op(aten.clone.default, source, memory_format=torch.contiguous_format)
    return local.build.op(aten.reshape.default, source, size)


def _can_view(source: fx.Node, size: list[int]) -> bool:
    value: torch.Tensor = source.meta["val"]
    try:
        with without_dispatch():
            torch.empty_strided(value.shape, value.stride(), device="meta").view(size)
    except (RuntimeError, ValueError):
        return False
    return True


FORMS: Mapping[str, LocalForm] = {**dict.fromkeys(SIZE_POSITIONS, sized), **dict.fromkeys(RESHAPES, reshape)}
