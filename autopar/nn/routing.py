"""What a gate decides, and the counting that gates share. Every shape is fixed by the inputs' shapes.

Tokens are rows of a matrix [tokens, d_model]. A choice is one (token, expert) pair; a choice that is dropped has the
number of experts as its expert, one past the last, and the weight 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.errors import UnsupportedOptionError


class Routing(NamedTuple):
    """A gate's answer for one batch.

    `experts`: int64 [tokens, choices], `num_experts` where there is none. `weights`: [tokens, choices], what a chosen
    expert's output is multiplied by, 0 where there is none. `aux_loss`: a scalar to add to the loss. `dropped`: int64
    scalar, the choices that found no room. `capacity`: no expert has more tokens than this; a number, not a tensor.
    """

    experts: Tensor
    weights: Tensor
    aux_loss: Tensor
    dropped: Tensor
    capacity: int


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, indices) of the k largest along the last dim, largest first; of equal ones the lowest index first.

    `torch.topk` leaves the order of equal values open; here the routing must be the same on every device.
    """
    values, indices = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[..., :k], indices[..., :k]


def count_tokens(experts: Tensor, num_experts: int) -> Tensor:
    """int64 [..., num_experts]: how many entries along the last dim name each expert; dropped ones do not count."""
    zeros = experts.new_zeros((*experts.shape[:-1], num_experts + 1))
    return zeros.scatter_add(-1, experts, torch.ones_like(experts))[..., :num_experts]


def position_in_expert(experts: Tensor, num_experts: int) -> Tensor:
    """int64, like `experts` [groups, entries]: how many earlier entries of the row name the same expert.

    By a stable sort: memory is that of the entries, not entries times experts as for a running sum of one-hot rows.
    """
    ordered, origin = torch.sort(experts, dim=-1, stable=True)
    counts = count_tokens(experts, num_experts + 1)  # the dropped ones are an expert of their own here
    first = torch.cumsum(counts, -1) - counts
    rank = torch.arange(experts.shape[-1], device=experts.device) - first.gather(-1, ordered)
    return torch.zeros_like(experts).scatter(-1, origin, rank)


def keep_within_capacity(experts: Tensor, num_experts: int, capacity: int) -> Tensor:
    """bool, like `experts` [groups, tokens, choices]: whether the expert still has room when the choice's turn comes.

    All first choices come before all second ones, and so on; among equals the earlier token comes first
    (Lepikhin et al. 2020, algorithm 1; with one choice, Fedus et al. 2021).
    """
    groups, tokens, choices = experts.shape
    by_priority = experts.transpose(1, 2).reshape(groups, choices * tokens)
    kept = position_in_expert(by_priority, num_experts) < capacity
    return kept.reshape(groups, choices, tokens).transpose(1, 2)


def expert_capacity(tokens: int, choices: int, num_experts: int, factor: float | None) -> int:
    """Tokens that an expert may take: factor times its even share, rounded up; all of them if `factor` is None."""
    if factor is None:
        return tokens
    return min(tokens, math.ceil(factor * tokens * choices / num_experts))


def are_sizes(*numbers: object) -> bool:
    """Whether all are whole numbers of at least 1."""
    return all(isinstance(item, int) and not isinstance(item, bool) and item >= 1 for item in numbers)


def check_capacity_factor(factor: float | None) -> None:
    """Raise UnsupportedOptionError unless the factor is None (dropless) or a number >= 0."""
    if factor is not None and not (math.isfinite(factor) and factor >= 0):
        raise UnsupportedOptionError(
            f"capacity_factor {factor} is no share of the tokens",
            fix="give a number >= 0 (1.25 lets an expert take a quarter more than its even share), or None: no limit",
        )
