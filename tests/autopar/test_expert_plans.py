"""Experts on the ranks that hold them, tokens by all-to-all: losses and gradients are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule

import autopar
from autopar.errors import ConstraintError
from autopar.nn import Experts, MixtureOfExperts, TopKGate
from tests.autopar.nn.routings import constant_router
from tests.autopar.nn.test_mixture import HIDDEN, WIDTH, TinyTransformer, make
from tests.autopar.parity import STEPS, Gaps, adam, train_beside
from tests.gloo import run_on_ranks

EXPERTS = "*/autopar.experts*"  # the layers, forward and backward
CASES = [  # gate, mesh, layout of the tokens (A: by all-to-all along that axis, I: inside), what it shows
    ("top-k, capacity", (2, 2), "A,A"),
    ("all to two", (4,), "A"),  # every token to the same two experts, none to the others
    ("gshard", (2, 2), "S0,A"),  # data parallel beside expert parallel
    ("balanced", (2, 2), "A,I"),  # every expert cut inside, too
    ("sigmoid", (8,), "A"),  # and shared experts
    ("k = experts", (4,), "A"),  # three experts on four ranks: one has none
]


def transformer(gate: str) -> TinyTransformer:
    """In float64. "all to two": the first number of each token is 1, so that a constant router is constant."""
    torch.manual_seed(0)
    if gate != "all to two":
        return TinyTransformer(make(gate)).double()
    router = constant_router(TopKGate(WIDTH, 4), [0.0, 9.0, 5.0, 0.0])
    model = TinyTransformer(MixtureOfExperts(router, Experts(4, WIDTH, HIDDEN))).double()
    with torch.no_grad():
        model.norm.weight[0], model.norm.bias[0] = 0, 1
    return model


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    ids, labels = torch.randint(32, (2, 8, 4))
    return ids, labels


@pytest.mark.parametrize(("gate", "mesh", "layout"), CASES)
def test_an_expert_parallel_layer_computes_what_one_device_computes(
    gate: str, mesh: tuple[int, ...], layout: str
) -> None:
    model = transformer(gate)
    report = autopar.verify(model, mesh, example_inputs=tokens(), constraints={EXPERTS: layout})
    assert report.ok and report.worst_relative_error < 1e-10, report.table
    names = {item.name for item in report.comparisons}
    assert {"mixture.gate.weight", "mixture.experts.gate_up_proj", "mixture.experts.down_proj"} <= names


def mixtral() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Two layers of Mixtral, with its auxiliary loss."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(**sizes, **heads, output_router_logits=True, attn_implementation="eager")
    torch.manual_seed(0)
    ids = torch.randint(32, (4, 8))
    return transformers.MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(("mesh", "layout"), [((2, 2), "S0,A")])
def test_experts_of_a_model_of_transformers_go_parallel_too(mesh: tuple[int, ...], layout: str) -> None:
    model, inputs = mixtral()
    report = autopar.verify(model, mesh, example_inputs=inputs, constraints={EXPERTS: layout})
    assert report.ok, report.table


def test_an_expert_parallel_layer_may_be_a_stage_of_a_pipeline() -> None:
    model, inputs = mixtral()
    options: dict[str, Any] = {"stages": 2, "microbatches": 1, "schedule": "1f1b", "constraints": {EXPERTS: "A"}}
    report = autopar.verify(model, (2, 2), example_inputs=inputs, **options)
    assert report.ok, report.table


DISPATCH = ("expert_ranks", "pack_rows", "all_to_all_rows", "_c10d_functional.all_to_all_single")


def dispatch_of(gm: GraphModule) -> list[int]:
    """How often a graph finds tokens' ranks, packs rows, sends them, and tells how many will come."""
    targets = [str(node.target) for node in gm.graph.nodes]
    return [sum(name in target for target in targets) for name in DISPATCH]


def train(mesh_shape: tuple[int, ...], layout: str) -> list[tuple[list[list[int]], list[int], Gaps]]:
    """How each model's phases send rows, its load, and how far five steps of AdamW are from one device's."""
    found = []
    for model, inputs in ((transformer("all to two"), tokens()), mixtral()):
        mesh = init_device_mesh("cpu", mesh_shape)
        pmodel = autopar.compile(model, mesh, example_inputs=inputs, constraints={EXPERTS: layout})
        sent = [dispatch_of(pmodel.forward_graph), dispatch_of(pmodel.backward_graph)]
        gaps = train_beside(pmodel, adam(pmodel), (model, inputs))
        load = pmodel.expert_load.matrix
        if isinstance(model, TinyTransformer):
            assert load.tolist() == [pmodel.mixture.expert_load.tolist()]
        pmodel.reset_expert_load()
        assert not pmodel.expert_load.matrix.any()
        found.append((sent, load.sum(1).tolist(), gaps))
    return found


def test_on_real_ranks_expert_parallel_models_train_as_on_one_device() -> None:
    ranks = run_on_ranks(train, 2, (2,), "A")
    assert ranks[0] == ranks[1]
    choices = 32 * 2 * STEPS
    once = [[1, 1, 2, 1], [0, 2, 2, 0]]  # the backward goes as the forward; results alone travel as they are
    twice = [[2 * count for count in phase] for phase in once]
    assert [found[:2] for found in ranks[0]] == [(once, [choices]), (twice, [choices, choices])]
    for (_, _, gaps), limit in zip(ranks[0], (1e-10, 1e-4), strict=True):  # in float64, in float32
        assert max(gaps.losses) <= limit / 10 and gaps.gradient <= limit and gaps.parameter <= 1.0, gaps


class Wide(nn.Module):
    """A layer of experts between dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(2048, 2048)
        self.mixture = MixtureOfExperts(TopKGate(2048, 64, 2), Experts(64, 2048, 4096))
        self.head = nn.Linear(2048, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dense(x).relu()
        output, aux_loss = self.mixture(x)
        loss: torch.Tensor = self.head(x + output).square().mean() + aux_loss
        return loss


def test_the_search_sends_tokens_where_that_is_cheapest() -> None:
    with torch.device("meta"):
        model, x = Wide(), torch.empty(128, 1024, 2048)
    plan = autopar.make_plan(model, autopar.Mesh((32,), hardware="h100"), example_inputs=x)
    layers = [entry for entry in plan.entries if "autopar.experts" in entry.key]
    cut = [[str(layout[0]) for layout in entry.inputs] for entry in layers]
    assert len(layers) == 2 and all(set(layouts) == {"S(0)"} for layouts in cut), cut


def test_what_has_no_tokens_to_send_is_refused() -> None:
    model = transformer("top-k")
    with pytest.raises(ConstraintError, match="head/addmm#0 cannot send its tokens"):
        autopar.make_plan(model, (2,), example_inputs=tokens(), constraints={"head/addmm#0": "A"})


def test_the_weights_of_experts_say_which_rank_has_which() -> None:
    plan = autopar.make_plan(
        transformer("top-k, capacity"), (2, 2), example_inputs=tokens(), constraints={EXPERTS: "A,A"}
    )
    text = plan.explain("mixture.experts.down_proj")
    assert "why these experts there: 4 experts lie over" in text and "at most" in text
    assert "why these experts" not in plan.explain("mixture.gate.weight")
