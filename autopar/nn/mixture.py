"""The mixture-of-experts layer: a gate, its experts, and experts that every token shares."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.errors import UnsupportedOptionError
from autopar.nn.experts import Experts
from autopar.nn.gates.gate import Gate
from autopar.nn.routing import Routing, count_tokens


class MixtureOfExperts(nn.Module):
    """Replaces a feed-forward network: `output, aux_loss = layer(x)`; add `aux_loss` to the loss.

    A token that no expert computes gets zero from them, so keep a residual connection around the layer.
    `shared_experts` is any module that maps [..., d_model] to the same shape; its output is added.

    In training the layer counts, in int64 buffers: `expert_load` [experts], tokens computed by each expert;
    `dropped_choices`, choices that found no room; `dropped_tokens`, tokens that no expert computed; `routed_tokens`,
    all of them. They add up over steps; `reset_counts()` starts anew.

    >>> import torch
    >>> from autopar.nn import Experts, MixtureOfExperts, SwitchGate
    >>> layer = MixtureOfExperts(SwitchGate(16, 4), Experts(4, 16, 32))
    >>> output, aux_loss = layer(torch.randn(2, 8, 16))
    >>> output.shape, int(layer.routed_tokens)
    (torch.Size([2, 8, 16]), 16)
    """

    expert_load: Tensor
    dropped_choices: Tensor
    dropped_tokens: Tensor
    routed_tokens: Tensor

    def __init__(self, gate: Gate, experts: Experts, shared_experts: nn.Module | None = None) -> None:
        super().__init__()
        if (gate.num_experts, gate.d_model) != (experts.num_experts, experts.d_model):
            raise UnsupportedOptionError(
                f"the gate routes tokens of {gate.d_model} numbers to {gate.num_experts} experts, but there are "
                f"{experts.num_experts} experts for tokens of {experts.d_model}",
                fix="give both the same num_experts and d_model",
            )
        self.gate, self.experts, self.shared_experts = gate, experts, shared_experts
        self.register_buffer("expert_load", torch.zeros(gate.num_experts, dtype=torch.int64))
        for name in ("dropped_choices", "dropped_tokens", "routed_tokens"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(output [..., tokens, d_model], auxiliary loss, a scalar) of `x` [..., tokens, d_model]."""
        routing: Routing = self.gate(x)
        if self.training:
            self._count(routing)
        output: Tensor = self.experts(x.reshape(-1, x.shape[-1]), routing).reshape(x.shape)
        if self.shared_experts is not None:
            output = output + self.shared_experts(x)
        return output, routing.aux_loss

    def _count(self, routing: Routing) -> None:
        num_experts = self.gate.num_experts
        with torch.no_grad():
            self.expert_load.add_(count_tokens(routing.experts.reshape(-1), num_experts))
            self.dropped_choices.add_(routing.dropped)
            self.dropped_tokens.add_((routing.experts == num_experts).all(-1).sum())
            self.routed_tokens.add_(len(routing.experts))

    def reset_counts(self) -> None:
        """Set all counts to zero."""
        for counter in (self.expert_load, self.dropped_choices, self.dropped_tokens, self.routed_tokens):
            counter.zero_()
