"""Expert layers of transformers, captured as one op each, compute what the library computes; configurations stay."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations import moe

import autopar
from autopar.capture.program import Program
from autopar.capture.replacements import experts
from autopar.capture.replacements.experts import activation_of, traceable_experts
from autopar.capture.trace import capture, tensor_leaves
from autopar.verification import compare, eager_values, traced_values

EXPERTS, HIDDEN, INNER, TOKENS = 4, 8, 12, 10  # rows of the weights are a multiple of 16 bytes, as eager demands


class Config:
    """As much of a configuration as the interface reads."""

    def __init__(self, implementation: str | None) -> None:
        self._experts_implementation_internal = implementation

    @property
    def _experts_implementation(self) -> str | None:
        return self._experts_implementation_internal


class Layer(nn.Module):
    """Weights in the layouts of the library; the router is a linear map."""

    def __init__(self, config: Config, dims: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_experts = EXPERTS
        self.act_fn = nn.SiLU()
        for name, shape in dims.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) * 0.3))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """What `eager` stands for: experts that are hit, found by data."""
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, column = torch.where(top_k_index == expert)
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, -1)
            rows = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            out = out.index_add(0, token, rows * top_k_weights[token, column, None])
        return out


class Normalized(Layer):
    """Its activation looks at all of a row: no elementwise function."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.softmax(gate, -1) * up


class InTurns(Layer):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        return (up.clamp(-1, 1) + 1) * gate * torch.sigmoid(gate * 1.7)


PLAIN = {"gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN), "down_proj": (EXPERTS, HIDDEN, INNER)}
TURNED = {
    "gate_up_proj": (EXPERTS, HIDDEN, 2 * INNER),
    "gate_up_proj_bias": (EXPERTS, 2 * INNER),
    "down_proj": (EXPERTS, INNER, HIDDEN),
    "down_proj_bias": (EXPERTS, HIDDEN),
}
UNGATED = {"up_proj": (EXPERTS, INNER, HIDDEN), "down_proj": (EXPERTS, HIDDEN, INNER)}
LAYERS: dict[str, tuple[type[Layer], dict[str, tuple[int, ...]], dict[str, bool]]] = {
    "plain": (Layer, PLAIN, {}),
    "in turns, transposed, biased": (
        InTurns,
        TURNED,
        {"is_concatenated": False, "is_transposed": True, "has_bias": True},
    ),
    "without gate": (Layer, UNGATED, {"has_gate": False}),
    "normalized": (Normalized, PLAIN, {}),
}


class Model(nn.Module):
    def __init__(self, name: str, implementation: str | None) -> None:
        super().__init__()
        kind, dims, options = LAYERS[name]
        decorated = moe.use_experts_implementation(type(kind.__name__, (kind,), {}), **options)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = decorated(Config(implementation), dims)

    def forward(self, x: Tensor) -> Tensor:
        scores, index = self.router(x).softmax(-1).topk(2, -1)
        out: Tensor = self.experts(x, index, scores)
        return out


def ops_of(program: Program) -> Counter[str]:
    return Counter(str(node.target) for node in program.graph_module.graph.nodes)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_any_layout_is_captured_and_computes_what_the_library_computes(
    name: str, implementation: str
) -> None:
    model, x = Model(name, implementation), torch.randn(TOKENS, HIDDEN)
    program = capture(model, (x,), {})
    assert model.experts.config._experts_implementation == implementation
    op = "grouped_mm" if name == "normalized" else "experts"
    assert ops_of(program)[f"autopar.{op}.default"] and not ops_of(program)["aten._grouped_mm.default"]
    expected = eager_values(model, program, (x,), {})
    actual = traced_values(model, program, tensor_leaves((x,), {}), seed=0)
    report = compare(actual, expected, reference="eager")
    assert report.ok, report.table
    assert len(expected.gradients) == len(list(model.parameters()))


def test_every_plan_of_a_layer_that_is_not_elementwise_is_right_too() -> None:
    model, x = Model("normalized", "grouped_mm"), torch.randn(16, HIDDEN)
    for search in ("ddp", "megatron"):
        report = autopar.verify(model, (2, 2), example_inputs=x, search=search)
        assert report.ok, report.table


def test_an_implementation_of_the_users_own_is_kept() -> None:
    def zeros(layer: Any, hidden_states: Tensor, *_: Tensor) -> Tensor:
        return hidden_states * layer.down_proj.sum()

    moe.ALL_EXPERTS_FUNCTIONS["of_my_own"] = zeros
    try:
        program = capture(Model("plain", "of_my_own"), (torch.randn(TOKENS, HIDDEN),), {})
    finally:
        del moe.ALL_EXPERTS_FUNCTIONS["of_my_own"]
    assert not ops_of(program)["autopar.experts.default"]


def test_a_failed_capture_leaves_the_configuration() -> None:
    model = Model("plain", None)
    with pytest.raises(ZeroDivisionError), traceable_experts(model):
        assert model.experts.config._experts_implementation == "autopar"
        raise ZeroDivisionError
    assert model.experts.config._experts_implementation is None
    report = autopar.verify(model, (2,), example_inputs=torch.randn(8, HIDDEN))
    assert report.ok, report.table


@pytest.mark.parametrize("operands", ["rows", "matrices", "both", "batches"])
def test_products_in_groups_of_every_form_are_those_of_torch(operands: str) -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shape = {"rows": (3, 4, 8), "matrices": (3, 4, 8), "both": (12, 4), "batches": (3, 4, 8)}[operands]
            self.weight = nn.Parameter(torch.randn(shape))

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            if operands == "rows":
                return F.grouped_mm(x, self.weight, offs=ends)
            if operands == "matrices":
                return F.grouped_mm(self.weight, x.t(), offs=ends)
            if operands == "both":
                return F.grouped_mm(self.weight.t(), x, offs=ends)
            return F.grouped_mm(x.view(3, 4, 4), self.weight)

    sizes = {"rows": (12, 4), "matrices": (12, 8), "both": (12, 4), "batches": (12, 4)}
    model, args = Grouped(), (torch.randn(sizes[operands]), torch.tensor([4, 4, 12], dtype=torch.int32))
    program = capture(model, args, {})
    expected = eager_values(model, program, args, {})
    report = compare(traced_values(model, program, tensor_leaves(args, {}), seed=0), expected, reference="eager")
    assert report.ok, report.table


class Raising(nn.Module):
    """An activation that takes no sample."""

    def forward(self, x: Tensor) -> Tensor:
        raise LookupError("no table for these values")


def layer_without_gate(activation: nn.Module) -> SimpleNamespace:
    return SimpleNamespace(has_gate=False, is_concatenated=True, _is_expert_parallel=False, act_fn=activation)


def test_what_an_activation_raises_on_a_sample_is_no_error_but_a_fault_of_ours_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert activation_of(layer_without_gate(Raising()), torch.float32) is None
    assert activation_of(layer_without_gate(nn.SiLU()), torch.float32) == "y0 = aten.silu.default(x0); y0"

    def fault(*_: Any) -> bool:
        raise KeyError("ours")

    monkeypatch.setattr(experts._ActivationWriter, "is_structure", fault)
    with pytest.raises(KeyError, match="ours"):
        activation_of(layer_without_gate(nn.SiLU()), torch.float32)
