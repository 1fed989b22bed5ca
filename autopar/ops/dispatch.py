"""Tokens on their way to the ranks that hold their experts, and back: how many go where is known at run time alone.

A token goes once to each rank that holds any of its experts, with all of its choices: the rank's own layer of experts
computes those that are its own, and the sender adds up what comes back. What travels is rows of bytes, so that tensors
of several dtypes go in one all-to-all. Fake kernels, which plans are made with, take choices as spread evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from autopar.ops.define import fake_of, op


def expected_copies(choices: int, ranks: int) -> float:
    """To how many of `ranks` ranks a token goes on average, each of its choices being on any of them alike."""
    return ranks * (1.0 - (1.0 - 1.0 / ranks) ** choices)


@op("expert_ranks(Tensor index, int[] starts, int[] ends) -> (Tensor, Tensor)")
def expert_ranks(index: Tensor, starts: Sequence[int], ends: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(tokens to send, rank after rank and in their order; how many go to each rank), of `index` [T, K].

    Rank r holds the experts from starts[r] up to ends[r]; choices of any other go nowhere.
    """
    low, high = (index.new_tensor(list(edges)).view(-1, 1, 1) for edges in (starts, ends))
    goes = ((index >= low) & (index < high)).any(-1)
    return goes.nonzero()[:, 1].clone(), goes.sum(1)  # not a view of both columns: it is kept for the backward


@op("expert_counts(Tensor index, SymInt first, SymInt experts) -> Tensor")
def expert_counts(index: Tensor, first: int, experts: int) -> Tensor:
    """int64 [experts]: how often `index` names each expert, from `first` on."""
    own = (index >= first) & (index < first + experts)
    return torch.bincount(torch.where(own, index - first, experts).flatten(), minlength=experts + 1)[:experts].clone()


@op("expert_places(Tensor index, Tensor places, SymInt start) -> Tensor")
def expert_places(index: Tensor, places: Tensor, start: int) -> Tensor:
    """`index` with a place of each expert for its number, of `places` [experts, most], -1 behind an expert's last.

    The choices of an expert take its places in turn, in their order, from place number `start` on, so that each gets
    equally many but for one. Dropped choices stay. Equal inputs give the same places on every device.
    """
    experts, most = places.shape
    is_expert = (index >= 0) & (index < experts)
    number = index.clamp(0, experts - 1)
    if most == 1:
        return torch.where(is_expert, places[number, 0].to(index.dtype), index)
    chosen = torch.where(is_expert, index, experts).flatten()
    order, counts = torch.argsort(chosen, stable=True), torch.bincount(chosen, minlength=experts + 1)
    turn = torch.empty_like(order)
    turn[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[chosen[order]]
    turn = (turn.view_as(index) + start) % (places >= 0).sum(1)[number]
    return torch.where(is_expert, places[number, turn].to(index.dtype), index)


@op("all_to_all_rows(Tensor rows, Tensor coming, Tensor sent, str group) -> Tensor")
def all_to_all_rows(rows: Tensor, coming: Tensor, sent: Tensor, group: str) -> Tensor:
    """`all_to_all_single` of rows, with how many come from each rank and go to each in tensors; to be waited for."""
    target = torch.ops._c10d_functional.all_to_all_single.default
    received: Tensor = target(rows, coming.tolist(), sent.tolist(), group)
    return received


def packed_row(dtypes: Sequence[torch.dtype], widths: Sequence[int]) -> tuple[list[int], int]:
    """(the first byte of each tensor's part, the bytes of all) of a packed row: every part can be viewed in its dtype.

    The widest dtypes come first, and the row ends on a multiple of the widest.
    """
    starts, end = [0] * len(dtypes), 0
    for place in sorted(range(len(dtypes)), key=lambda item: -dtypes[item].itemsize):
        starts[place] = end
        end += dtypes[place].itemsize * widths[place]
    widest = max(dtype.itemsize for dtype in dtypes)
    return starts, -(-end // widest) * widest


@op("pack_rows(Tensor[] tensors, Tensor? token) -> Tensor")
def pack_rows(tensors: Sequence[Tensor], token: Tensor | None) -> Tensor:
    """The rows `token` of the tensors [T, width], or all rows, side by side as `packed_row` says: uint8 [R, bytes]."""
    starts, row_bytes = packed_row([tensor.dtype for tensor in tensors], [tensor.shape[1] for tensor in tensors])
    rows = tensors[0].shape[0] if token is None else token.shape[0]
    packed = tensors[0].new_empty((rows, row_bytes), dtype=torch.uint8)
    packed[:, sum(tensor.shape[1] * tensor.element_size() for tensor in tensors) :].zero_()
    for tensor, start in zip(tensors, starts, strict=True):
        part = packed[:, start : start + tensor.shape[1] * tensor.element_size()].view(tensor.dtype)
        if token is None:
            part.copy_(tensor)
        else:
            torch.index_select(tensor, 0, token, out=part)
    return packed


@op("sum_by_token(Tensor rows, Tensor token, Tensor sent, Tensor like) -> Tensor")
def sum_by_token(rows: Tensor, token: Tensor, sent: Tensor, like: Tensor) -> Tensor:
    """[R, N] that came back -> [T, N], T as in `like`: per token the sum in the order of the ranks, on any device."""
    out = rows.new_zeros((like.shape[0], rows.shape[1]))
    for start, end in pairwise(accumulate(sent.tolist(), initial=0)):
        out.index_add_(0, token[start:end], rows[start:end])  # a token is once in what one rank gave
    return out


@op("sum_copies(Tensor rows, Tensor place, SymInt[] sent, SymInt count) -> Tensor")
def sum_copies(rows: Tensor, place: Tensor, sent: Sequence[int], count: int) -> Tensor:
    """[R, ...] that came back, sent[0] from the first rank and so on -> [count, ...]: in row place[r] the sum of the
    rows r, in the order of the ranks, on any device."""
    out = rows.new_zeros((count, *rows.shape[1:]))
    for start, end in pairwise(accumulate(sent, initial=0)):
        out.index_add_(0, place[start:end], rows[start:end])  # a row is once in what one rank gives back
    return out


@fake_of("expert_ranks")
def _(index: Tensor, starts: Sequence[int], ends: Sequence[int]) -> tuple[Tensor, Tensor]:
    tokens, choices = index.shape
    rows = math.ceil(tokens * expected_copies(choices, len(starts)))
    return index.new_empty(rows), index.new_empty(len(starts))


@fake_of("expert_counts")
def _(index: Tensor, first: int, experts: int) -> Tensor:
    return index.new_empty(experts, dtype=torch.int64)


@fake_of("expert_places")
def _(index: Tensor, places: Tensor, start: int) -> Tensor:
    return torch.empty_like(index)


@fake_of("sum_copies")
def _(rows: Tensor, place: Tensor, sent: Sequence[int], count: int) -> Tensor:
    return rows.new_empty((count, *rows.shape[1:]))


@fake_of("all_to_all_rows")
def _(rows: Tensor, coming: Tensor, sent: Tensor, group: str) -> Tensor:
    return torch.empty_like(rows)


@fake_of("pack_rows")
def _(tensors: Sequence[Tensor], token: Tensor | None) -> Tensor:
    rows = tensors[0].shape[0] if token is None else token.shape[0]
    _, row_bytes = packed_row([tensor.dtype for tensor in tensors], [tensor.shape[1] for tensor in tensors])
    return tensors[0].new_empty((rows, row_bytes), dtype=torch.uint8)


@fake_of("sum_by_token")
def _(rows: Tensor, token: Tensor, sent: Tensor, like: Tensor) -> Tensor:
    return rows.new_empty((like.shape[0], rows.shape[1]))
