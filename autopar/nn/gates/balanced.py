"""Balanced assignment of tokens to experts (BASE layers)."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.nn.gates.gate import Gate
from autopar.nn.routing import Routing, top_k
from autopar.ops.balanced_assignment import balanced_assignment


class BalancedGate(Gate):
    """In training every expert gets the same number of tokens, so that the sum of their scores is largest.

    A score is the product of a token with the expert's embedding; the weight is the sigmoid of the score. Where experts
    do not divide the tokens, no expert gets more than tokens / experts, rounded up. There is no auxiliary loss and
    nothing is dropped. In evaluation a token goes to the expert of its highest score.

    The assignment is one op, `autopar::balanced_assignment`: Sinkhorn prices, then shortest augmenting paths, which
    give an optimum where the paper's auction gives nearly one. It has no gradient; the scores get theirs through the
    weights.
    Source: Lewis et al. 2021 (arXiv:2103.16716), section 3: equations 1 to 4.
    """

    def __init__(self, d_model: int, num_experts: int, *, router_dtype: torch.dtype | None = torch.float32) -> None:
        super().__init__(d_model, num_experts, 1, router_dtype=router_dtype)

    def forward(self, x: Tensor) -> Routing:
        """Route the tokens of `x` [..., tokens, d_model]."""
        tokens = self.tokens(x)
        scores = self.logits(tokens)
        if self.training:
            experts = balanced_assignment(scores.detach()).unsqueeze(-1)
            capacity = -(-len(tokens) // self.num_experts)
        else:
            experts, capacity = top_k(scores, 1)[1], len(tokens)
        weights = torch.sigmoid(scores.gather(-1, experts))
        return Routing(experts, weights, scores.new_zeros(()), experts.new_zeros(()), capacity)
