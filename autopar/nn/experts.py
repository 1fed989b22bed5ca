"""Experts: feed-forward networks of one shape, their parameters stacked."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.errors import UnsupportedOptionError
from autopar.nn.routing import Routing, are_sizes
from autopar.ops import experts as _experts  # noqa: F401  (registers autopar::experts)

PROGRAMS = {  # of what stands between an expert's products, as `autopar::experts` reads it
    "swiglu": "y0 = aten.silu.default(x0); y1 = aten.mul.Tensor(y0, x1); y1",
    "gelu": "y0 = aten.gelu.default(x0); y0",
}


class FeedForward(nn.Module):
    """One dense feed-forward network without biases: what shared experts are.

    `activation`: "swiglu", down(silu(gate x) * up x), or "gelu", down(gelu(up x)).
    """

    def __init__(self, d_model: int, d_hidden: int, *, activation: str = "swiglu") -> None:
        super().__init__()
        check_sizes(1, d_model, d_hidden, activation)
        self.activation = activation
        self.up_proj = nn.Linear(d_model, d_hidden, bias=False)
        self.gate_proj = nn.Linear(d_model, d_hidden, bias=False) if activation == "swiglu" else None
        self.down_proj = nn.Linear(d_hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d_model] to the same shape."""
        up: Tensor = self.up_proj(x)
        output: Tensor = self.down_proj(F.gelu(up) if self.gate_proj is None else F.silu(self.gate_proj(x)) * up)
        return output


class Experts(nn.Module):
    """`num_experts` feed-forward networks; each token is computed by those that its routing names.

    Parameters as in transformers: `gate_up_proj` [experts, 2 d_hidden, d_model], gate before up ("swiglu"), or
    `up_proj` [experts, d_hidden, d_model] ("gelu"), and `down_proj` [experts, d_model, d_hidden].
    """

    def __init__(self, num_experts: int, d_model: int, d_hidden: int, *, activation: str = "swiglu") -> None:
        super().__init__()
        check_sizes(num_experts, d_model, d_hidden, activation)
        self.num_experts, self.d_model, self.d_hidden, self.activation = num_experts, d_model, d_hidden, activation
        if activation == "swiglu":
            self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * d_hidden, d_model))
        else:
            self.up_proj = nn.Parameter(torch.empty(num_experts, d_hidden, d_model))
        self.down_proj = nn.Parameter(torch.empty(num_experts, d_model, d_hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each expert as `nn.Linear` starts: uniform within 1 / sqrt(inputs)."""
        for parameter in self.parameters():
            bound = 1 / math.sqrt(parameter.shape[-1])
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """[tokens, d_model]: the weighted sum of each token's experts; zero for a token without one.

        One op, `autopar::experts`, whose cost is that of the tokens that are routed, in any numbers per expert.
        """
        is_gated = self.activation == "swiglu"
        up = torch.unflatten(self.gate_up_proj, 1, (2, -1)) if is_gated else self.up_proj.unsqueeze(1)
        down = self.down_proj
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else up.dtype
        values = (x.to(dtype), routing.experts, routing.weights, up.to(dtype), None, down.to(dtype), None)
        output: Tensor = torch.ops.autopar.experts(*values, PROGRAMS[self.activation], 0)
        return output

    def extra_repr(self) -> str:
        return f"{self.num_experts}, d_model={self.d_model}, d_hidden={self.d_hidden}, activation={self.activation!r}"


def check_sizes(num_experts: int, d_model: int, d_hidden: int, activation: str) -> None:
    """Raise UnsupportedOptionError for sizes below 1 and unknown activations."""
    if not are_sizes(num_experts, d_model, d_hidden):
        raise UnsupportedOptionError(
            f"{num_experts} experts from {d_model} to {d_hidden} numbers and back", fix="sizes are at least 1"
        )
    if activation not in PROGRAMS:
        raise UnsupportedOptionError(f"activation is {activation!r}", fix=f"use one of: {', '.join(PROGRAMS)}")
