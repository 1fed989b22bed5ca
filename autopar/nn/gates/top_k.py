"""The softmax gate of Mixtral, OLMoE, Qwen-MoE and many others."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.nn.gates.gate import CapacityGate, check_one_of
from autopar.nn.losses import load_balancing_loss, router_z_loss
from autopar.nn.routing import Routing, count_tokens, expert_capacity, keep_within_capacity, top_k


class TopKGate(CapacityGate):
    """Softmax over all experts, then the k most probable.

    `normalize`: "selected" divides the weights of a token's choices by their sum, which is a softmax over the chosen
    logits (Mixtral); "all" keeps the probabilities (OLMoE). The auxiliary loss is `balance_weight` times the
    load-balancing loss plus `z_weight` times the router z-loss. Without `capacity_factor` no token is dropped; with it,
    what is dropped is not made up for in the weights of the token's other choices.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int = 2,
        *,
        normalize: str = "selected",
        capacity_factor: float | None = None,
        balance_weight: float = 0.01,
        z_weight: float = 0.0,
        router_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        check_one_of("normalize", normalize, ("selected", "all"))
        super().__init__(d_model, num_experts, k, capacity_factor=capacity_factor, router_dtype=router_dtype)
        self.normalize, self.balance_weight, self.z_weight = normalize, balance_weight, z_weight

    def forward(self, x: Tensor) -> Routing:
        """Route the tokens of `x` [..., tokens, d_model]."""
        tokens = self.tokens(x)
        logits = self.logits(tokens)
        probabilities = torch.softmax(logits, -1)
        chosen, experts = top_k(logits, self.k)
        weights = torch.softmax(chosen, -1) if self.normalize == "selected" else probabilities.gather(-1, experts)
        counts = count_tokens(experts.reshape(-1), self.num_experts)
        balance = self.balance_weight * load_balancing_loss(probabilities, counts)
        capacity = expert_capacity(len(tokens), self.k, self.num_experts, self.capacity_factor)
        kept = keep_within_capacity(experts.unsqueeze(0), self.num_experts, capacity).squeeze(0)
        return Routing(
            torch.where(kept, experts, self.num_experts),
            torch.where(kept, weights, 0),
            balance + self.z_weight * router_z_loss(logits),
            torch.logical_not(kept).sum(),
            capacity,
        )
