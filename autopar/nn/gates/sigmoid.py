"""Sigmoid gating, balanced by a bias instead of a loss (DeepSeek-V3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.errors import UnsupportedOptionError
from autopar.nn.gates.gate import CapacityGate
from autopar.nn.losses import load_balancing_loss
from autopar.nn.routing import Routing, count_tokens, expert_capacity, keep_within_capacity, top_k


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """Experts lie in `groups` groups, in order (a group is what one node holds); a token uses at most `chosen` of them.

    A group's score is the sum of its `summed` highest biased scores.
    """

    groups: int
    chosen: int
    summed: int = 2


class SigmoidGate(CapacityGate):
    """The k experts of the highest sigmoid score plus bias; the weights are the scores alone, normalized and scaled.

    In training, after the choices are made, the buffer `expert_bias` goes down by `bias_update_rate` for every expert
    with more than the mean of the choices, and up for those with less; it has no gradient. Every call in training is a
    step: with gradient accumulation the bias moves at each microbatch.

    `sequence_balance_weight` times the sequence-wise loss is the auxiliary loss: E/k sum_i f_i P_i per sequence, with
    scores normalized over experts; the sequences are the second last dim of the input.
    `group_limit` restricts a token to the experts of a few groups (node-limited routing).

    Source: DeepSeek-AI 2024 (arXiv:2412.19437), section 2.1.2, equations 12 to 20; Wang et al. 2024 (arXiv:2408.15664).
    """

    expert_bias: Tensor

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int = 8,
        *,
        scale: float = 1.0,
        bias_update_rate: float = 1e-3,
        sequence_balance_weight: float = 1e-4,
        group_limit: GroupLimit | None = None,
        capacity_factor: float | None = None,
        router_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        super().__init__(d_model, num_experts, k, capacity_factor=capacity_factor, router_dtype=router_dtype)
        self.scale, self.bias_update_rate = scale, bias_update_rate
        self.sequence_balance_weight, self.group_limit = sequence_balance_weight, group_limit
        if group_limit is not None:
            self._check_groups(group_limit)
        self.register_buffer("expert_bias", torch.zeros(num_experts))

    def _check_groups(self, limit: GroupLimit) -> None:
        size = self.num_experts // max(1, limit.groups)
        whole = limit.groups >= 1 and self.num_experts % limit.groups == 0
        if not whole or not 1 <= limit.chosen <= limit.groups or not 1 <= limit.summed <= size:
            raise UnsupportedOptionError(
                f"{limit} does not fit {self.num_experts} experts",
                fix="groups divides the experts, chosen is at most groups, summed at most the experts of a group",
            )
        if limit.chosen * size < self.k:
            raise UnsupportedOptionError(
                f"{limit.chosen} groups of {size} experts hold fewer than the {self.k} that a token chooses",
                fix="let a token use more groups",
            )

    def reset_parameters(self) -> None:
        """The router as in every gate; the bias is zero."""
        super().reset_parameters()
        if hasattr(self, "expert_bias"):
            self.expert_bias.zero_()

    def forward(self, x: Tensor) -> Routing:
        """Route the tokens of `x` [..., sequence, d_model]."""
        tokens = self.tokens(x)
        scores = torch.sigmoid(self.logits(tokens))
        _, experts = top_k(self.allowed(scores.detach() + self.expert_bias), self.k)
        chosen = scores.gather(-1, experts)
        weights = chosen / chosen.sum(-1, keepdim=True) * self.scale
        aux_loss = self.sequence_balance_weight * sequence_balance_loss(scores, experts, x.shape[-2])
        self.update_bias(count_tokens(experts.reshape(-1), self.num_experts))
        capacity = expert_capacity(len(tokens), self.k, self.num_experts, self.capacity_factor)
        kept = keep_within_capacity(experts.unsqueeze(0), self.num_experts, capacity).squeeze(0)
        return Routing(
            torch.where(kept, experts, self.num_experts),
            torch.where(kept, weights, 0),
            aux_loss,
            torch.logical_not(kept).sum(),
            capacity,
        )

    def allowed(self, biased: Tensor) -> Tensor:
        """`biased` scores [tokens, experts], -inf outside of the groups that the token may use."""
        if self.group_limit is None:
            return biased
        limit = self.group_limit
        grouped = biased.reshape(len(biased), limit.groups, -1)
        group_scores = top_k(grouped, limit.summed)[0].sum(-1)
        _, best = top_k(group_scores, limit.chosen)
        mask = torch.zeros_like(group_scores, dtype=torch.bool)
        usable = mask.scatter(-1, best, torch.ones_like(best, dtype=torch.bool)).unsqueeze(-1)
        return torch.where(usable, grouped, -torch.inf).reshape(biased.shape)

    def update_bias(self, counts: Tensor) -> None:
        """Move the bias against the load error, in training; `counts` int64 [experts] are compared exactly."""
        if self.training:
            with torch.no_grad():
                error = torch.sign(counts.sum() - counts * self.num_experts)
                self.expert_bias.add_(error.to(self.expert_bias.dtype) * self.bias_update_rate)


def sequence_balance_loss(scores: Tensor, experts: Tensor, sequence: int) -> Tensor:
    """The mean over sequences of sum_i f_i P_i (equations 17 to 20).

    `scores` [tokens, experts]; `experts` [tokens, k]; `sequence` tokens each.
    """
    num_experts = scores.shape[-1]
    probabilities = (scores / scores.sum(-1, keepdim=True)).reshape(-1, sequence, num_experts)
    counts = count_tokens(experts.reshape(len(probabilities), -1), num_experts)
    return load_balancing_loss(probabilities, counts)
