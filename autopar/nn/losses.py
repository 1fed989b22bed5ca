"""Auxiliary losses that balance experts; all scalars, differentiable in the gate's scores."""

from __future__ import annotations

import torch
from torch import Tensor


def squared_variation(values: Tensor) -> Tensor:
    """The square of the coefficient of variation, of a whole population: variance / mean**2.

    Source: Shazeer et al. 2017 (arXiv:1701.06538), section 4, the importance and load losses.
    """
    mean = values.mean()
    return (values - mean).square().mean() / mean.square()


def load_balancing_loss(probabilities: Tensor, counts: Tensor) -> Tensor:
    """num_experts * sum_i f_i P_i: 1 where the router is uniform, up to num_experts where it collapses.

    `probabilities` [..., tokens, experts] gives P, the mean over tokens; `counts` [..., experts] gives f, the share of
    choices, without gradient. Leading dims are averaged over.
    Source: Fedus, Zoph and Shazeer 2021 (arXiv:2101.03961), equations 4 to 6; with several choices per token as in
    Mixtral's released code.
    """
    shares = counts.to(probabilities.dtype) / counts.sum(-1, keepdim=True)
    return counts.shape[-1] * (shares * probabilities.mean(-2)).sum(-1).mean()


def router_z_loss(logits: Tensor) -> Tensor:
    """The mean over tokens of the squared log-sum-exp of `logits` [..., tokens, experts]: keeps them small.

    Source: Zoph et al. 2022 (ST-MoE, arXiv:2202.08906), equation 5.
    """
    return torch.logsumexp(logits, -1).square().mean()
