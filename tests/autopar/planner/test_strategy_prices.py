"""Prices of local forms: a long ring is priced from short ones, exactly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture.trace import capture
from autopar.planner.strategy_prices import TraitsOfForms
from autopar.sharding.op_call import OpCall, call_of
from autopar.sharding.registry import rules_of
from autopar.sharding.strategies import strategies_of


class Attention(nn.Module):
    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal, self.weight = causal, nn.Parameter(torch.ones(8, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=self.causal).sum()


def attention_calls(*, causal: bool) -> list[OpCall]:
    x = torch.zeros(2, 4, 48, 8, device="meta")
    graph = capture(Attention(causal=causal), (x,), {}).graph_module.graph
    calls = [call_of(node) for node in graph.nodes if node.op == "call_function" and "attention" in str(node.target)]
    return [call for call in calls if call.name.startswith("autopar.attention")]


@pytest.mark.parametrize("mesh_shape", [(8,), (4, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_long_ring_runs_what_its_emission_shows(mesh_shape: tuple[int, ...], *, causal: bool) -> None:
    traits, seen = TraitsOfForms(mesh_shape), set[tuple[str, ...]]()
    for call in attention_calls(causal=causal):
        for strategy in strategies_of(call, rules_of(call), mesh_shape):
            key = call.name, *traits.key(strategy)
            if "ring" in key and key not in seen:
                seen.add(key)
                assert traits.of(call, strategy) == traits._emitted(call, strategy, mesh_shape)
    assert len(seen) >= 2 * len(mesh_shape)
