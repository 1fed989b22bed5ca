"""The layer against a loop over tokens and experts, and distributed against itself on one device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import UnsupportedOptionError
from autopar.nn import (
    BalancedGate,
    ExpertChoiceGate,
    Experts,
    FeedForward,
    Gate,
    GroupLimit,
    GShardGate,
    MixtureOfExperts,
    NoisyTopKGate,
    SigmoidGate,
    SwitchGate,
    TopKGate,
)
from tests.autopar.nn.routings import constant_router

WIDTH, HIDDEN = 8, 12

GATES: dict[str, Callable[[], Gate]] = {
    "top-k": lambda: TopKGate(WIDTH, 4, 2, z_weight=1e-3),
    "top-k, capacity": lambda: TopKGate(WIDTH, 4, 2, capacity_factor=0.7, normalize="all"),
    "k = experts": lambda: TopKGate(WIDTH, 3, 3),
    "one expert": lambda: TopKGate(WIDTH, 1, 1),
    "noisy": lambda: NoisyTopKGate(WIDTH, 4, 2),
    "gshard": lambda: GShardGate(WIDTH, 4, groups=2),
    "switch": lambda: SwitchGate(WIDTH, 4),
    "switch, nothing fits": lambda: SwitchGate(WIDTH, 4, capacity_factor=0.0),
    "switch, dropless": lambda: SwitchGate(WIDTH, 4, capacity_factor=None),
    "switch, skewed": lambda: constant_router(SwitchGate(WIDTH, 4, capacity_factor=2.0), [0.0, 9.0, 0.0, 0.0]),
    "expert choice": lambda: ExpertChoiceGate(WIDTH, 4),
    "balanced": lambda: BalancedGate(WIDTH, 4),
    "sigmoid": lambda: SigmoidGate(WIDTH, 8, 2, group_limit=GroupLimit(4, 2)),
}


def make(name: str, activation: str = "swiglu") -> MixtureOfExperts:
    gate = GATES[name]()
    shared = FeedForward(WIDTH, HIDDEN, activation=activation) if name == "sigmoid" else None
    return MixtureOfExperts(gate, Experts(gate.num_experts, WIDTH, HIDDEN, activation=activation), shared)


def one_expert(experts: Experts, number: int, token: Tensor) -> Tensor:
    if experts.activation == "gelu":
        return experts.down_proj[number] @ F.gelu(experts.up_proj[number] @ token)
    gate_up = experts.gate_up_proj[number] @ token
    return experts.down_proj[number] @ (F.silu(gate_up[:HIDDEN]) * gate_up[HIDDEN:])


def by_loops(layer: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    """(output, auxiliary loss): token by token, expert by expert."""
    routing = layer.gate(x)
    rows = []
    for token, experts, weights in zip(x.reshape(-1, WIDTH), routing.experts, routing.weights, strict=True):
        row = torch.zeros_like(token) if layer.shared_experts is None else layer.shared_experts(token)
        for expert, weight in zip(experts.tolist(), weights, strict=True):
            if expert < layer.gate.num_experts:
                row = row + weight * one_expert(layer.experts, expert, token)
        rows.append(row)
    return torch.stack(rows).reshape(x.shape), routing.aux_loss


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("name", GATES)
def test_the_layer_is_the_weighted_sum_of_each_tokens_experts(name: str, activation: str) -> None:
    layer = make(name, activation).double()
    twin = copy.deepcopy(layer)
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    x[..., 0] = 1  # so that a constant router is constant
    mask = torch.randn_like(x)
    results = []
    for compute in (layer, functools.partial(by_loops, twin)):
        torch.manual_seed(5)
        output, aux_loss = compute(x)
        ((output * mask).sum() + aux_loss).backward()
        results.append((output, aux_loss))
    torch.testing.assert_close(results[0], results[1])
    for (parameter_name, mine), theirs in zip(layer.named_parameters(), twin.parameters(), strict=True):
        zero = torch.zeros_like(mine)
        gradients = [zero if item.grad is None else item.grad for item in (mine, theirs)]
        torch.testing.assert_close(*gradients, msg=parameter_name)


def test_the_layer_counts_what_it_routes_and_drops_in_training() -> None:
    gate = constant_router(SwitchGate(WIDTH, 4, capacity_factor=1.0, jitter=0.0), [0.0, 9.0, 0.0, 0.0])
    layer = MixtureOfExperts(gate, Experts(4, WIDTH, HIDDEN))
    x = torch.ones(2, 8, WIDTH)
    for step in (1, 2):
        output, _ = layer(x)
        assert layer.expert_load.tolist() == [0, 4 * step, 0, 0]
        assert (layer.dropped_choices, layer.dropped_tokens, layer.routed_tokens) == (12 * step, 12 * step, 16 * step)
    assert bool((output.reshape(16, WIDTH)[4:] == 0).all())
    layer.eval()(x)
    assert int(layer.routed_tokens) == 32
    layer.reset_counts()
    assert layer.expert_load.tolist() == [0, 0, 0, 0]
    assert (layer.dropped_choices, layer.dropped_tokens, layer.routed_tokens) == (0, 0, 0)


def test_a_token_counts_as_dropped_if_all_of_its_choices_are() -> None:
    gate = constant_router(TopKGate(WIDTH, 2, 2, capacity_factor=0.5), [0.0, 9.0])
    layer = MixtureOfExperts(gate, Experts(2, WIDTH, HIDDEN))
    layer(torch.ones(8, WIDTH))
    assert (layer.dropped_choices, layer.dropped_tokens) == (8, 4)


def test_a_model_in_bfloat16_stays_in_bfloat16() -> None:
    layer = make("top-k").bfloat16()
    output, aux_loss = layer(torch.randn(4, WIDTH).bfloat16())
    assert output.dtype == torch.bfloat16
    assert aux_loss.dtype == torch.float32


def test_a_gate_and_experts_of_other_sizes_are_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="to 4 experts, but there are 3 experts"):
        MixtureOfExperts(TopKGate(WIDTH, 4), Experts(3, WIDTH, HIDDEN))
    with pytest.raises(UnsupportedOptionError, match="use one of: swiglu, gelu"):
        Experts(4, WIDTH, HIDDEN, activation="relu")
    with pytest.raises(UnsupportedOptionError, match="0 experts"):
        Experts(0, WIDTH, HIDDEN)
    for k in (0, 1.5, True):
        with pytest.raises(UnsupportedOptionError, match=f"no {k} experts of 4"):
            TopKGate(WIDTH, 4, k)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(UnsupportedOptionError, match=r"4\.0 experts"):
        Experts(4.0, WIDTH, HIDDEN)  # type: ignore[arg-type]  # wrong on purpose


class TinyTransformer(nn.Module):
    """One block with a mixture of experts; the loss is the cross-entropy and the auxiliary loss."""

    def __init__(self, mixture: MixtureOfExperts) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mixture = mixture
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        q, k, v = self.attention(x).unsqueeze(1).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        routed, aux_loss = self.mixture(self.norm(x))
        loss = F.cross_entropy(self.head(x + routed).flatten(0, 1), labels.flatten())
        return loss + aux_loss


DISTRIBUTED = [
    ("top-k, capacity", (2, 2), "ddp"),
    ("noisy", (2,), "ilp"),
    ("gshard", (2, 2), "fsdp"),
    ("switch, skewed", (2, 2), "fsdp"),
    ("expert choice", (4,), "ddp"),
    ("balanced", (2,), "ddp"),
    ("sigmoid", (4,), "fsdp"),
]


@pytest.mark.parametrize(("name", "mesh", "search"), DISTRIBUTED)
def test_distributed_it_computes_what_one_device_computes(name: str, mesh: tuple[int, ...], search: str) -> None:
    model = TinyTransformer(make(name))
    ids = torch.randint(32, (2, 8, 4))
    report = autopar.verify(model, mesh, example_inputs=(ids[0], ids[1]), search=search)
    assert report.ok, report.table
    names = {item.name for item in report.comparisons}
    assert {"mixture.gate.weight", "mixture.experts.down_proj", "mixture.expert_load"} <= names
