"""Top-1 gating of Switch Transformers."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.errors import UnsupportedOptionError
from autopar.nn.gates.gate import CapacityGate
from autopar.nn.losses import load_balancing_loss, router_z_loss
from autopar.nn.routing import Routing, count_tokens, expert_capacity, keep_within_capacity, top_k


class SwitchGate(CapacityGate):
    """One expert per token, its output times its probability; an expert takes `capacity_factor` tokens / experts.

    In training the router's input is multiplied by uniform noise of [1 - jitter, 1 + jitter]. The auxiliary loss is
    `aux_weight` E sum_i f_i P_i + `z_weight` times the router z-loss (zero in the paper). Tokens beyond an expert's
    room are dropped in their order: their output is zero, for the caller's residual connection to carry them on.
    `capacity_factor=None` drops nothing.

    Source: Fedus, Zoph and Shazeer 2021 (arXiv:2101.03961), section 2, equations 1 to 6; z-loss: Zoph et al. 2022
    (arXiv:2202.08906), equation 5.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        *,
        capacity_factor: float | None = 1.25,
        jitter: float = 0.01,
        aux_weight: float = 0.01,
        z_weight: float = 0.0,
        router_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        super().__init__(d_model, num_experts, 1, capacity_factor=capacity_factor, router_dtype=router_dtype)
        if not 0 <= jitter < 1:
            raise UnsupportedOptionError(f"jitter {jitter} is not in [0, 1)", fix="the paper uses 0.01")
        self.jitter, self.aux_weight, self.z_weight = jitter, aux_weight, z_weight

    def forward(self, x: Tensor) -> Routing:
        """Route the tokens of `x` [..., tokens, d_model]."""
        tokens = self.tokens(x)
        logits = self.logits(self.jittered(tokens))
        probabilities = torch.softmax(logits, -1)
        _, experts = top_k(logits, 1)
        counts = count_tokens(experts.reshape(-1), self.num_experts)
        balance = self.aux_weight * load_balancing_loss(probabilities, counts)
        capacity = expert_capacity(len(tokens), 1, self.num_experts, self.capacity_factor)
        kept = keep_within_capacity(experts.unsqueeze(0), self.num_experts, capacity).squeeze(0)
        return Routing(
            torch.where(kept, experts, self.num_experts),
            torch.where(kept, probabilities.gather(-1, experts), 0),
            balance + self.z_weight * router_z_loss(logits),
            torch.logical_not(kept).sum(),
            capacity,
        )

    def jittered(self, tokens: Tensor) -> Tensor:
        """The tokens as the router sees them, in its dtype."""
        if not self.training or not self.jitter:
            return tokens
        wide = tokens if self.router_dtype is None else tokens.to(torch.promote_types(tokens.dtype, self.router_dtype))
        return wide * (1 - self.jitter + 2 * self.jitter * torch.rand_like(wide))
