"""A transformer's step from its parallel sizes: directions that must hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_models.hardware import load_profile
from autopar.cost_models.transformer import Software, TransformerPlan, TransformerShape, model_flops, step_time

GPT = TransformerShape(layers=24, hidden=2048, heads=16, ffn=8192, vocab=50304, seq=2048)
H100 = load_profile("h100")
SOFTWARE = Software()


def total_s(plan: TransformerPlan, software: Software = SOFTWARE) -> float:
    return step_time(GPT, plan, H100, software).total_s


def test_parameters_are_twelve_hidden_squared_a_layer_and_the_table() -> None:
    assert GPT.parameters == pytest.approx(24 * 12 * 2048**2 + 50304 * 2048, rel=1e-3)
    assert model_flops(GPT, 1) > 6 * GPT.parameters


def test_no_step_beats_the_peak() -> None:
    plan = TransformerPlan(microbatch=8)
    least_s = 6 * 24 * 12 * 2048**2 * 8 * 2048 / H100.device.peak("bfloat16")
    assert total_s(plan) > least_s


@pytest.mark.parametrize("recompute", ["selective", "ops", "alternate", "full"])
def test_recomputation_costs_time(recompute: str) -> None:
    plan = TransformerPlan(microbatch=4)
    assert total_s(replace(plan, recompute=recompute)) > total_s(plan)  # type: ignore[arg-type]


def test_more_microbatches_shrink_the_share_of_the_bubble() -> None:
    few, many = (step_time(GPT, TransformerPlan(pipeline=8, microbatches=m), H100, SOFTWARE) for m in (8, 64))
    assert few.pipeline_s / few.total_s > many.pipeline_s / many.total_s


def test_interleaving_shrinks_the_bubble() -> None:
    plan = TransformerPlan(pipeline=8, microbatches=16, microbatch=4)
    assert total_s(replace(plan, chunks=3)) < total_s(plan)


def test_tensor_parallelism_over_nodes_costs_more_than_inside_one() -> None:
    inside = step_time(GPT, TransformerPlan(tensor=8, microbatch=8), H100, SOFTWARE)
    across = step_time(GPT, TransformerPlan(tensor=16, microbatch=8), H100, SOFTWARE)
    assert across.tensor_communication_s > inside.tensor_communication_s


def test_the_host_bounds_small_blocks() -> None:
    plan = TransformerPlan(tensor=8, microbatch=1)
    slow_host = replace(SOFTWARE, host_s_per_layer=5e-3)
    assert total_s(plan, slow_host) >= 24 * 3 * 5e-3


def test_sharded_optimizer_states_step_faster() -> None:
    replicated = step_time(GPT, TransformerPlan(data=64, microbatch=4), H100, SOFTWARE)
    sharded = step_time(GPT, TransformerPlan(data=64, microbatch=4, storage="zero1"), H100, SOFTWARE)
    assert sharded.optimizer_s < replicated.optimizer_s / 32


def test_unfused_attention_pays_for_its_scores() -> None:
    plan = TransformerPlan(microbatch=4)
    assert total_s(plan, replace(SOFTWARE, unfused_attention="unfused")) > total_s(plan)
