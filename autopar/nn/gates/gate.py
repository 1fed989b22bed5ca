"""What all gates have in common: a router, its precision, and checks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.errors import InputError, UnsupportedOptionError
from autopar.nn.routing import Routing, are_sizes, check_capacity_factor


def check_one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    """Raise UnsupportedOptionError for a word that the option does not know."""
    if value not in known:
        raise UnsupportedOptionError(f"{option} is {value!r}", fix=f"use one of: {', '.join(known)}")


class Gate(nn.Module, ABC):
    """Scores every token for every expert: a linear router `weight` [num_experts, d_model]. Base of the gates below.

    The router is computed in `router_dtype`, or in the input's dtype where that is wider (None: always in the input's),
    whatever autocast says: Fedus et al. 2021 (arXiv:2101.03961) name this selective precision.
    Raises UnsupportedOptionError for sizes that fit no gate, InputError for a batch that cannot be routed.
    """

    def __init__(
        self, d_model: int, num_experts: int, k: int, *, router_dtype: torch.dtype | None = torch.float32
    ) -> None:
        super().__init__()
        if not are_sizes(d_model, num_experts, k) or k > num_experts:
            raise UnsupportedOptionError(
                f"{type(self).__name__}: no {k} experts of {num_experts} can be chosen for tokens of {d_model} numbers",
                fix="sizes are at least 1, and a token chooses at most all of the experts",
            )
        self.d_model, self.num_experts, self.k, self.router_dtype = d_model, num_experts, k, router_dtype
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with a variance of 1 / d_model, so that logits of normalized tokens are of order one."""
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.d_model))

    def tokens(self, x: Tensor) -> Tensor:
        """`x` [..., d_model] as [tokens, d_model]."""
        if x.dim() < 2 or x.shape[-1] != self.d_model:
            raise InputError(
                f"{type(self).__name__} routes tokens of {self.d_model} numbers; the input's shape is {tuple(x.shape)}",
                fix="give [..., tokens, d_model]",
            )
        if x.numel() == 0:
            raise InputError(
                f"the batch has no tokens: its shape is {tuple(x.shape)}",
                fix="leave empty batches out: shares and means over their tokens have no value",
            )
        return x.reshape(-1, self.d_model)

    def logits(self, tokens: Tensor) -> Tensor:
        """[tokens, num_experts], in the router's dtype."""
        return self.project(tokens, self.weight)

    def project(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """tokens @ weight.T in the router's dtype."""
        dtype = tokens.dtype if self.router_dtype is None else torch.promote_types(tokens.dtype, self.router_dtype)
        with torch.autocast(tokens.device.type, enabled=False):
            return F.linear(tokens.to(dtype), weight.to(dtype))

    @abstractmethod
    def forward(self, x: Tensor) -> Routing:
        """Route the tokens of `x` [..., tokens, d_model]."""

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, num_experts={self.num_experts}, k={self.k}"


class CapacityGate(Gate):
    """A gate whose experts take at most `capacity_factor` times their even share of tokens; None: no limit."""

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        capacity_factor: float | None,
        router_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        check_capacity_factor(capacity_factor)
        super().__init__(d_model, num_experts, k, router_dtype=router_dtype)
        self.capacity_factor = capacity_factor

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, capacity_factor={self.capacity_factor}"
