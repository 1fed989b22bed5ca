"""Expert choice: experts pick tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.nn.gates.gate import CapacityGate
from autopar.nn.routing import Routing, expert_capacity, top_k


class ExpertChoiceGate(CapacityGate):
    """Every expert takes the tokens that score highest for it, `capacity_factor` tokens / experts of them.

    Scores are a softmax over experts; a token may be picked by any number of experts, or by none. Load is balanced by
    construction, so there is no auxiliary loss, and nothing is dropped for lack of room. What a token gets depends on
    the other tokens of the batch, later ones included: not for causal generation.

    Source: Zhou et al. 2022 (arXiv:2202.09368), section 3.2, equations 1 and 2: k = n c / e, rounded up.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        *,
        capacity_factor: float = 2.0,
        router_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        super().__init__(d_model, num_experts, 1, capacity_factor=capacity_factor, router_dtype=router_dtype)

    def forward(self, x: Tensor) -> Routing:
        """Route the tokens of `x` [..., tokens, d_model]. A token has one choice per expert, most of them empty."""
        tokens = self.tokens(x)
        scores = torch.softmax(self.logits(tokens), -1)
        capacity = expert_capacity(len(tokens), 1, self.num_experts, self.capacity_factor)
        _, picked_tokens = top_k(scores.t(), capacity)
        mask = torch.zeros_like(scores.t(), dtype=torch.bool)
        picked = mask.scatter(-1, picked_tokens, torch.ones_like(picked_tokens, dtype=torch.bool)).t()
        names = torch.arange(self.num_experts, device=scores.device)
        return Routing(
            torch.where(picked, names, self.num_experts),
            torch.where(picked, scores, 0),
            scores.new_zeros(()),
            names.new_zeros(()),
            capacity,
        )
