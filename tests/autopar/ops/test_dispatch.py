"""Rows of several dtypes as rows of bytes."""

from __future__ import annotations

import pytest
import torch

from autopar.ops.dispatch import packed_row

ops = torch.ops.autopar


@pytest.mark.parametrize("token", [None, torch.tensor([3, 0, 3])], ids=["all rows", "some rows"])
def test_every_part_of_a_packed_row_can_be_viewed_as_what_was_packed(token: torch.Tensor | None) -> None:
    tensors = [torch.randn(4, 3, dtype=torch.bfloat16), torch.randint(9, (4, 2)), torch.randn(4, 5).t()[:4, :3]]
    packed = ops.pack_rows(tensors, token)
    dtypes, widths = [item.dtype for item in tensors], [item.shape[1] for item in tensors]
    starts, row_bytes = packed_row(dtypes, widths)
    assert (starts, row_bytes) == ([28, 0, 16], 40) and packed.shape[1] == row_bytes
    for tensor, start in zip(tensors, starts, strict=True):
        part = packed[:, start : start + tensor.shape[1] * tensor.element_size()].view(tensor.dtype)
        assert torch.equal(part, tensor if token is None else tensor[token])
    assert not packed[:, 34:].any()  # no byte that is sent is left as it was found


def test_no_rows_are_packed_as_none() -> None:
    packed = ops.pack_rows([torch.randn(0, 3), torch.randint(9, (0, 2))], torch.empty(0, dtype=torch.int64))
    assert packed.shape == (0, 32) and packed[:, 16:28].view(torch.float32).shape == (0, 3)
