"""What ops with a price of their own cost under their rules."""

from __future__ import annotations

import pytest
import torch

from autopar.mesh import Mesh
from autopar.planner.prices import Prices
from autopar.sharding.execution import call_in, trace_op
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
