"""Top-2 gating in groups with random dispatch to the second expert (GShard)."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.errors import InputError, UnsupportedOptionError
from autopar.nn.gates.gate import CapacityGate, check_one_of
from autopar.nn.routing import Routing, count_tokens, expert_capacity, keep_within_capacity, top_k


class GShardGate(CapacityGate):
    """The two most probable experts, each with room for `capacity_factor` times its even share within a group.

    The tokens are cut, in order, into `groups` groups of equal size; each has its own room and its own loss. In
    training (`random_dispatch`: "training" or "never") the second expert gets the token with probability 2 g_2, g_2 its
    normalized weight; a choice holds its place in the expert's queue also when it is not dispatched. The auxiliary loss
    is `aux_weight` times the mean over groups of 1/E sum_e (c_e / S) m_e: c_e the first choices of e among S tokens,
    m_e its mean probability.

    Source: Lepikhin et al. 2020 (arXiv:2006.16668), section 2.2 and algorithm 1. `capacity_factor` 1 is the paper's
    2N / (G E); None drops nothing.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        *,
        groups: int = 1,
        capacity_factor: float | None = 1.0,
        random_dispatch: str = "training",
        aux_weight: float = 0.01,
        router_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        check_one_of("random_dispatch", random_dispatch, ("training", "never"))
        super().__init__(d_model, num_experts, 2, capacity_factor=capacity_factor, router_dtype=router_dtype)
        if groups < 1:
            raise UnsupportedOptionError(f"tokens cannot be cut into {groups} groups", fix="give groups >= 1")
        self.groups, self.random_dispatch, self.aux_weight = groups, random_dispatch, aux_weight

    def forward(self, x: Tensor) -> Routing:
        """Route the tokens of `x` [..., tokens, d_model]."""
        tokens = self.tokens(x)
        if len(tokens) % self.groups:
            raise InputError(
                f"{len(tokens)} tokens do not divide into {self.groups} groups of equal size",
                fix="choose `groups` as a divisor of the batch's tokens, or pad the batch",
            )
        logits = self.logits(tokens)
        gates = torch.softmax(logits, -1).reshape(self.groups, -1, self.num_experts)
        _, experts = top_k(logits.reshape(gates.shape), 2)
        weights = gates.gather(-1, experts)
        weights = weights / weights.sum(-1, keepdim=True)
        capacity = expert_capacity(gates.shape[1], 2, self.num_experts, self.capacity_factor)
        room = keep_within_capacity(experts, self.num_experts, capacity)
        sent = torch.logical_and(room, self.dispatched(weights))
        return Routing(
            torch.where(sent, experts, self.num_experts).reshape(-1, 2),
            torch.where(sent, weights, 0).reshape(-1, 2),
            self.aux_weight * mean_gate_loss(gates, experts[..., 0]),
            torch.logical_not(room).sum(),
            capacity * self.groups,
        )

    def dispatched(self, weights: Tensor) -> Tensor:
        """bool [groups, tokens, 2]: the first choice always, the second with probability twice its weight."""
        first = torch.ones_like(weights[..., :1], dtype=torch.bool)
        if not self.training or self.random_dispatch == "never":
            return torch.cat([first, first], -1)
        second = weights[..., 1:].detach()
        return torch.cat([first, 2 * second > torch.rand_like(second)], -1)


def mean_gate_loss(gates: Tensor, first: Tensor) -> Tensor:
    """Algorithm 1, line 13, and the mean over groups. `gates` [groups, tokens, experts]; `first` [groups, tokens]."""
    shares = count_tokens(first, gates.shape[-1]) / gates.shape[1]
    return (shares.to(gates.dtype) * gates.mean(1)).mean(-1).mean()
