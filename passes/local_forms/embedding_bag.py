"""Bags of embeddings whose table's rows are sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.passes.local_forms.ranges import clear, shift_into_range
from autopar.sharding.rules.embedding import ROWS

aten = torch.ops.aten


def embedding_bag(local: LocalCall) -> LocalValue:
    """Sums in which the rows of other ranks weigh nothing."""
    if not local.axes_with(ROWS):
        return local.plain()
    build = local.build
    defaults = (False, 0, False, None)  # scale_grad_by_freq, mode, sparse, per_sample_weights
    filled: list[Any] = [*local.args, *defaults[len(local.args) - 3 :]]
    table, indices, offsets, by_frequency, mode, is_sparse, weights = filled[:7]
    (start, _), (rows, _) = local.input_chunk(0)
    shifted, outside = shift_into_range(build, indices, start, rows)
    if weights is None:
        weights = build.op(aten.new_ones.default, table, list(indices.meta["val"].shape))
    own = clear(build, shifted, outside), offsets, by_frequency, mode, is_sparse, clear(build, weights, outside)
    bags = build.op(local.call.target, table, *own, *filled[7:])
    return tuple(local.output(bags, index) for index in range(4))


def embedding_bag_backward(local: LocalCall) -> LocalValue:
    """Gradients of rows that another rank holds go to one row more, the padding row, which is cut off."""
    if not local.axes_with(ROWS):
        return local.plain()
    build = local.build
    grad, indices, *bags, _, by_frequency, mode, is_sparse, weights = local.args[:11]
    padding_index = local.call.argument(11, "padding_idx", -1)
    (start, _), (rows, _) = local.output_chunk()
    shifted, skipped = shift_into_range(build, indices, start, rows)
    if padding_index >= 0:
        skipped = build.op(aten.bitwise_or.Tensor, skipped, build.op(aten.eq.Scalar, indices, padding_index))
    own = clear(build, shifted, skipped, rows)
    options = (rows + 1, by_frequency, mode, is_sparse, weights, rows)
    gradient = build.op(local.call.target, grad, own, *bags, *options)
    return build.op(aten.slice.Tensor, gradient, 0, 0, rows)


FORMS: Mapping[str, LocalForm] = {
    "aten._embedding_bag.default": embedding_bag,
    "aten._embedding_bag_forward_only.default": embedding_bag,
    "aten._embedding_bag_backward.default": embedding_bag_backward,
}
