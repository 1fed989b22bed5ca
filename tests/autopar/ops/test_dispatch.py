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


@pytest.mark.parametrize("start", [0, 1, 5])
def test_choices_of_an_expert_take_its_places_in_turn_and_dropped_ones_stay(start: int) -> None:
    index = torch.randint(-1, 5, (40, 3), generator=torch.Generator().manual_seed(0))  # -1 and 4: dropped
    places = torch.tensor([[7, -1, -1], [3, 5, 6], [0, 1, -1], [2, 2, 4]])  # one has two slots of one group
    found = ops.expert_places(index, places, start)
    for expert, own in enumerate(([7], [3, 5, 6], [0, 1], [2, 2, 4])):
        taken = found[index == expert]
        assert taken.tolist() == [own[(start + turn) % len(own)] for turn in range(len(taken))]
    dropped = (index < 0) | (index > 3)
    assert torch.equal(found[dropped], index[dropped])
    assert ops.expert_places(index[:0], places, start).shape == (0, 3)


@pytest.mark.parametrize("most", [1, 3])
def test_places_are_numbers_of_the_kind_that_experts_are(most: int) -> None:
    """The rows that are sent are packed by it: a wider one would shift all that follows."""
    index = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)
    places = torch.tensor([[2, -1, -1], [0, 1, -1], [3, 4, 5]])[:, :most]
    assert ops.expert_places(index, places, 0).dtype == torch.int32


def test_copies_that_came_back_are_added_up_in_the_order_of_the_ranks() -> None:
    rows = torch.tensor([[1e8], [3.0], [1.0], [-1e8]])
    found = ops.sum_copies(rows, torch.tensor([0, 2, 0, 0]), [2, 1, 1], 3)
    assert found.tolist() == [[0.0], [0.0], [3.0]]
