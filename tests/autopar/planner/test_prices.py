"""What ops with a price of their own cost under their rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.cost_models.hardware import KernelCost, load_profile
from autopar.mesh import Mesh
from autopar.planner.prices import Prices, kernel_class
from autopar.sharding.execution import call_in, trace_op
from autopar.sharding.op_call import OpCall
from autopar.sharding.registry import rules_of
from autopar.sharding.rules.experts import INSIDE, OWN_EXPERTS
from autopar.sharding.strategies import Strategy

ops = torch.ops.autopar
ACTIVATION = "y0 = aten.silu.default(x0); y1 = aten.mul.Tensor(y0, x1); y1"


def layer() -> tuple[object, ...]:
    index, scores = torch.zeros(8192, 2, dtype=torch.int64, device="meta"), torch.empty(8192, 2, device="meta")
    up, down = torch.empty(8, 2, 4096, 1024, device="meta"), torch.empty(8, 1024, 4096, device="meta")
    return torch.empty(8192, 1024, device="meta"), index, scores, up, None, down, None, ACTIVATION, 0


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_experts_cost_what_their_products_do_and_half_of_it_on_two_ranks(direction: str) -> None:
    forward = (ops.experts.default, layer())
    grad = torch.empty(8192, 1024, device="meta")
    backward = (ops.experts_backward.default, (grad, *layer(), ACTIVATION, [True, True, True, False, True, False]))
    target, args = forward if direction == "forward" else backward
    call = call_in(trace_op(target, args, {}))
    prices = Prices(Mesh((2,), hardware="h100"))
    whole, *halves = (
        prices.op(call, [Strategy((rule,))])[0]
        for rule in rules_of(call)
        if rule.form in (OWN_EXPERTS, INSIDE) or all(placement.is_replicate() for placement in rule.inputs)
    )
    flops = 2 * 8192 * 2 * 1024 * 4096 * (3 if direction == "forward" else 3 * 2 + 2)
    slowest = flops / 30e12  # a float32 product reaches more than that on this device
    assert 0 < whole < slowest
    assert len(halves) == 2 and all(0.45 < half / whole < 0.7 for half in halves)


def call_of_op(op: Any, *arguments: Any) -> OpCall:
    return call_in(trace_op(op, arguments, {}))


def test_an_op_is_priced_by_its_own_cost_apart_where_that_matters() -> None:
    aten, x = torch.ops.aten, torch.ones(4, 6)
    assert kernel_class(call_of_op(aten.gelu.default, x)) == "aten.gelu"
    assert kernel_class(call_of_op(aten.add.Scalar, x, 1.0)) == "aten.add"
    assert kernel_class(call_of_op(aten.sum.dim_IntList, x, [-1])) == "aten.sum"
    assert kernel_class(call_of_op(aten.sum.dim_IntList, x, [0])) == "aten.sum of rows"
    assert kernel_class(call_of_op(aten.clone.default, x)) == "aten.clone"
    profile = load_profile("cpu")
    slow = replace(profile, device=replace(profile.device, kernels={"aten.gelu": KernelCost(1.0, 1.0)}))
    call = call_of_op(aten.gelu.default, x)
    assert Prices(Mesh((2,), hardware=slow)).local_op(call) == pytest.approx(1.0 + 2 * x.nbytes)
    assert Prices(Mesh((2,), hardware=profile)).local_op(call) < 1e-3


def test_a_causal_mask_saves_half_where_the_kernel_skips_it() -> None:
    q = torch.ones(1, 2, 4096, 64)
    prices = Prices(Mesh((2,), hardware="h100"))
    whole, causal = (
        prices.local_op(call_of_op(torch.ops.autopar.attention.default, q, q, q, None, None, 0.0, flag, None, 0,
                                   [0] * 4, [1, 2, 4096, 4096]))
        for flag in (False, True)
    )  # fmt: skip
    assert causal == pytest.approx(whole / 2, rel=0.1)
