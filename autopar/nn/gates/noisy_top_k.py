"""Noisy top-k gating with the importance and load losses of Shazeer et al. 2017."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.nn.gates.gate import Gate
from autopar.nn.losses import squared_variation
from autopar.nn.routing import Routing, count_tokens, top_k


class NoisyTopKGate(Gate):
    """In training, adds learned noise to the logits before the k largest are kept; no token is dropped.

    H = x W_g + N(0, 1) softplus(x W_noise); weights are a softmax over the k largest of H. The auxiliary loss is
    `importance_weight` CV(sum of weights)^2 + `load_weight` CV(load)^2, CV over experts, with the smooth estimator of
    the load: the probability that a fresh draw of an expert's noise puts it among the k largest. In evaluation there is
    no noise, and the load is the count of tokens, which has no gradient.

    Source: Shazeer et al. 2017 (arXiv:1701.06538), section 2.1, equations 3 to 5, section 4 and appendix A.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int = 4,
        *,
        importance_weight: float = 0.1,
        load_weight: float = 0.1,
        router_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        super().__init__(d_model, num_experts, k, router_dtype=router_dtype)
        self.importance_weight, self.load_weight = importance_weight, load_weight
        self.noise_weight = nn.Parameter(torch.zeros(num_experts, d_model))

    def reset_parameters(self) -> None:
        """Zeros: no signal and some noise, so that the load starts out balanced (appendix A)."""
        nn.init.zeros_(self.weight)
        if hasattr(self, "noise_weight"):
            nn.init.zeros_(self.noise_weight)

    def forward(self, x: Tensor) -> Routing:
        """Route the tokens of `x` [..., tokens, d_model]."""
        tokens = self.tokens(x)
        clean = scores = self.logits(tokens)
        noise_std = None
        if self.training:
            noise_std = F.softplus(self.project(tokens, self.noise_weight))
            scores = clean + torch.randn_like(clean) * noise_std
        chosen, experts = top_k(scores, self.k)
        weights = torch.softmax(chosen, -1)
        importance = torch.zeros_like(clean).scatter(-1, experts, weights).sum(0)
        if noise_std is None:
            load = count_tokens(experts.reshape(-1), self.num_experts).to(weights.dtype)
        else:
            load = probability_in_top_k(clean, scores, noise_std, self.k).sum(0)
        aux_loss = self.importance_weight * squared_variation(importance) + self.load_weight * squared_variation(load)
        return Routing(experts, weights, aux_loss, experts.new_zeros(()), len(tokens))


def probability_in_top_k(clean: Tensor, scores: Tensor, noise_std: Tensor, k: int) -> Tensor:
    """P(x, i) [tokens, experts]: that expert i is among the k largest if its own noise alone is drawn again.

    It must then exceed the k-th largest score of the *other* experts, given their noise (equations 8 and 9).
    """
    if k == clean.shape[-1]:
        return torch.ones_like(clean)
    largest, experts = top_k(scores, k + 1)
    inside = torch.zeros_like(clean, dtype=torch.bool).scatter(
        -1, experts[..., :k], torch.ones_like(experts[..., :k], dtype=torch.bool)
    )
    threshold = torch.where(inside, largest[..., k:], largest[..., k - 1 : k])
    return 0.5 * (1 + torch.erf((clean - threshold) / (noise_std * math.sqrt(2))))
