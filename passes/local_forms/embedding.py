"""Embeddings whose table's rows are sharded."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.passes.local_forms.ranges import append_dims, clear, shift_into_range
from autopar.sharding.rules.embedding import ROWS

aten = torch.ops.aten


def embedding(local: LocalCall) -> LocalValue:
    """Rows that another rank holds read as zeros, so the ranks' results sum to the whole."""
    if not local.axes_with(ROWS):
        return local.plain()
    weight, indices = local.args[:2]
    (start, _), (rows, _) = local.input_chunk(0)
    shifted, outside = shift_into_range(local.build, indices, start, rows)
    looked_up = local.build.op(aten.embedding.default, weight, clear(local.build, shifted, outside))
    return clear(local.build, looked_up, append_dims(local.build, outside, 1))


def embedding_dense_backward(local: LocalCall) -> LocalValue:
    """Gradients of rows that another rank holds go to one row more, the padding row, which is cut off."""
    if not local.axes_with(ROWS):
        return local.plain()
    build = local.build
    grad, indices, _, padding_index, by_frequency = local.args
    (start, _), (rows, _) = local.output_chunk()
    shifted, skipped = shift_into_range(build, indices, start, rows)
    if padding_index >= 0:
        padding = build.op(aten.eq.Scalar, indices, padding_index)
        skipped = build.op(aten.bitwise_or.Tensor, skipped, padding)
    own = clear(build, shifted, skipped, rows)
    gradient = build.op(aten.embedding_dense_backward.default, grad, own, rows + 1, rows, by_frequency)
    return build.op(aten.slice.Tensor, gradient, 0, 0, rows)


FORMS: Mapping[str, LocalForm] = {
    "aten.embedding.default": embedding,
    "aten.embedding_dense_backward.default": embedding_dense_backward,
}
