"""Helpers of the gates' tests: a routing as a dense matrix, gradients of an auxiliary loss, chosen inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call

from autopar.nn import Gate, Routing

TOKENS, D_MODEL, EXPERTS = 12, 6, 4


def tokens(count: int = TOKENS, d_model: int = D_MODEL, seed: int = 1) -> Tensor:
    return torch.randn(count, d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def double(gate: Gate) -> Gate:
    """The gate in float64, with weights that are not those of its initialisation."""
    gate = gate.double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return gate


def combine_matrix(routing: Routing, num_experts: int = EXPERTS) -> Tensor:
    """[tokens, experts]: the weight of each expert's output for each token, 0 where it is not chosen."""
    padded = routing.weights.new_zeros(len(routing.experts), num_experts + 1)
    return padded.scatter_add(1, routing.experts, routing.weights)[:, :num_experts]


def chosen_pairs(routing: Routing, num_experts: int = EXPERTS) -> set[tuple[int, int]]:
    return {
        (token, expert) for token, row in enumerate(routing.experts.tolist()) for expert in row if expert != num_experts
    }


def check_shape_of(routing: Routing, num_experts: int = EXPERTS) -> None:
    """What every routing promises: weights of 0 exactly where there is no expert, none twice, capacity kept."""
    assert bool((routing.weights[routing.experts == num_experts] == 0).all())
    pairs = [(token, expert) for token, row in enumerate(routing.experts.tolist()) for expert in row]
    real = [pair for pair in pairs if pair[1] != num_experts]
    assert len(set(real)) == len(real)
    counts = torch.bincount(routing.experts.flatten(), minlength=num_experts + 1)[:num_experts]
    assert int(counts.max()) <= routing.capacity
    assert routing.aux_loss.shape == routing.dropped.shape == ()


def gradcheck(gate: Gate, x: Tensor, scalar: Callable[[Routing], Tensor]) -> bool:
    """Whether a scalar of the routing has the gradients, in x and in all parameters, of its finite differences."""
    names = [name for name, _ in gate.named_parameters()]

    def value(x: Tensor, *parameters: Tensor) -> Tensor:
        state = dict(gate.named_buffers()) | dict(zip(names, parameters, strict=True))
        torch.manual_seed(3)  # the same noise in every evaluation
        copies = {name: item.clone() for name, item in state.items()}  # of buffers that a call writes
        return scalar(functional_call(gate, copies, (x,)))

    parameters = [parameter.detach().clone().requires_grad_() for parameter in gate.parameters()]
    return torch.autograd.gradcheck(value, (x.clone().requires_grad_(), *parameters))


def check_gradients(gate: Gate, x: Tensor) -> None:
    """Of the auxiliary loss, and of the weights, which carry the model's loss into the router."""
    mask = torch.randn(len(x), gate.num_experts, dtype=x.dtype, generator=torch.Generator().manual_seed(5))
    assert gradcheck(gate, x, lambda routing: (combine_matrix(routing, gate.num_experts) * mask).sum())
    assert gradcheck(gate, x, lambda routing: routing.aux_loss)


def constant_router(gate: Gate, scores: list[float]) -> Gate:
    """A gate whose first expert scores `scores[0]` for every token whose first number is 1, and so on."""
    with torch.no_grad():
        gate.weight.zero_()
        gate.weight[:, 0] = torch.tensor(scores, dtype=gate.weight.dtype)
    return gate


def same_tokens(count: int = TOKENS, d_model: int = D_MODEL) -> Tensor:
    """Tokens whose first number is 1; the router above gives them all the same scores."""
    x = tokens(count, d_model)
    x[:, 0] = 1
    return x
