"""Every rule is executed: run on shards, recombined, compared in float64 with the op on the whole."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Shard

from autopar.sharding.execution import call_in, run_sharded, trace_op, worst_error
from autopar.sharding.op_call import OpCall
from autopar.sharding.registry import BUILT_IN, has_rule, rules_of
from autopar.sharding.rules.norms import MOMENTS
from autopar.sharding.strategies import Strategy
from tests.autopar.sharding.rules.model_calls import MODEL_CALLS, ModelCall
from tests.autopar.sharding.rules.proving import wrong_strategies
from tests.autopar.sharding.rules.recording import (
    Sample,
    elementwise_samples,
    has_defined_values,
    merged,
    op_db_samples,
)

MESHES = (((2,), (3,)), ((3,),))  # on which the samples of an overload run: the one with the most rules, another

# Rules that neither PyTorch's samples nor the calls of models reach, and why.
UNREACHED = {
    "aten._fused_rms_norm_backward.default": "runs on accelerators only: its form is compared with autograd below",
}


@pytest.fixture(scope="module")
def samples() -> dict[str, dict[OpCall, Sample]]:
    return merged(elementwise_samples(), op_db_samples())


def chosen(samples: dict[OpCall, Sample]) -> list[Sample]:
    """The sample with the most rules, and one from the middle."""
    ranked = sorted(samples, key=lambda call: -len(rules_of(call)))
    picks = [ranked[0], ranked[len(ranked) // 2]]
    return [samples[call] for call in dict.fromkeys(picks)]


@pytest.mark.slow
def test_every_rule_that_the_samples_of_pytorch_reach_holds_on_two_and_three_ranks(
    samples: dict[str, dict[OpCall, Sample]], capsys: pytest.CaptureFixture[str]
) -> None:
    covered = {name: calls for name, calls in samples.items() if any(map(has_rule, calls)) and has_defined_values(name)}
    wrong, correct, runs = [], 0, 0
    for name in sorted(covered):
        failures = []
        for sample, meshes in zip(chosen(covered[name]), MESHES, strict=False):
            found, count = wrong_strategies(sample.call.target, sample.args, sample.kwargs, meshes)
            failures += found
            runs += count
        correct += not failures
        wrong += failures
    with capsys.disabled():
        refused = len(samples) - len(covered)
        print(
            f"\nop overloads with a rule: {len(covered)}, correct: {correct}, no rule (replicated): {refused}", end=""
        )
        print(f"; {runs} strategies run", end=" ")
    assert not wrong, "\n".join(wrong)


def test_every_rule_of_the_tables_is_reached_by_a_proof(samples: dict[str, dict[OpCall, Sample]]) -> None:
    reached = {*samples, *(call.name_of_op for call in MODEL_CALLS)}
    missing = {name for name in BUILT_IN if name.startswith("aten.")} - reached - set(UNREACHED)
    assert not missing, "give them a call in MODEL_CALLS, or a reason in UNREACHED"


@pytest.mark.parametrize("call", MODEL_CALLS, ids=lambda call: call.name)
def test_every_rule_holds_on_shapes_of_models(call: ModelCall) -> None:
    meshes = ((2,), (3,), (2, 2))
    wrong, count = wrong_strategies(call.target, call.args(), call.kwargs, meshes, most=24)
    assert count > len(meshes), "the shapes let no rule run but the replicated one"
    assert not wrong, "\n".join(wrong)


def test_what_is_made_like_a_shard_lies_as_it_does_and_asks_for_no_other() -> None:
    ops, x = (torch.ops.aten.new_zeros.default, torch.ops.aten.new_ones.default), torch.randn(6, 4)
    for op in ops:
        rules = rules_of(call_in(trace_op(op, (x, [6, 12]), {})))
        cuts = [(rule.inputs, rule.outputs) for rule in rules]
        assert ((Shard(0),), (Shard(0),)) in cuts and ((Shard(1),), (Shard(1),)) not in cuts


def test_gradients_of_rms_norm_over_a_sharded_dim_are_those_of_autograd() -> None:
    source, weight = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((6, 4, 12), (12,)))
    grad = torch.randn(6, 4, 12, dtype=torch.float64)
    rstd = (source.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected = torch.autograd.grad(source * rstd * weight, (source, weight), grad)
    gm = graph_of_rms_norm_backward()
    tensors = [grad, source.detach(), rstd.detach(), weight.detach()]
    rules = [rule for rule in rules_of(call_in(gm)) if rule.form == MOMENTS]
    assert len(rules) == 1
    for mesh_shape in ((2,), (3,), (2, 2)):
        strategy = Strategy(tuple(rules) * len(mesh_shape))
        assert worst_error(run_sharded(gm, strategy, mesh_shape, tensors), expected) < 1e-10


def graph_of_rms_norm_backward() -> fx.GraphModule:
    """A graph of the one op, whose fake results are written down: the op itself cannot run here."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def with_value(node: fx.Node, *size: int) -> fx.Node:
        with mode:
            node.meta["val"] = torch.empty(size, dtype=torch.float64)
        return node

    sizes = ((6, 4, 12), (6, 4, 12), (6, 4, 1), (12,))
    grad, source, rstd, weight = (with_value(graph.placeholder(f"tensor_{i}"), *size) for i, size in enumerate(sizes))
    args = (grad, source, [12], rstd, weight, [True, True])
    node = graph.create_node("call_function", torch.ops.aten._fused_rms_norm_backward.default, args, {}, "op")
    node.meta["val"] = (source.meta["val"], weight.meta["val"])
    graph.output(tuple(graph.call_function(operator.getitem, (node, index)) for index in range(2)))
    return fx.GraphModule(torch.nn.Module(), graph)
