from __future__ import annotations

import math

import pytest
import torch

from autopar.errors import UnsupportedOptionError
from autopar.nn import SwitchGate
from tests.autopar.nn.routings import (
    D_MODEL,
    EXPERTS,
    check_gradients,
    check_shape_of,
    chosen_pairs,
    combine_matrix,
    constant_router,
    double,
    same_tokens,
    tokens,
)


@pytest.mark.parametrize("factor", [0.6, 1.25, None])
@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_weights_and_losses_are_those_of_the_equations(factor: float | None, jitter: float) -> None:
    options = {"jitter": jitter, "aux_weight": 0.3, "z_weight": 0.1}
    gate, x = double(SwitchGate(D_MODEL, EXPERTS, capacity_factor=factor, **options)), tokens()
    torch.manual_seed(11)
    routing = gate(x)
    torch.manual_seed(11)
    noise = 1 - jitter + 2 * jitter * torch.rand_like(x)
    capacity = math.inf if factor is None else factor * len(x) / EXPERTS
    expected = torch.zeros(len(x), EXPERTS, dtype=torch.float64)
    taken, argmaxes, means, z_loss = [0] * EXPERTS, [0] * EXPERTS, [0.0] * EXPERTS, 0.0
    for t in range(len(x)):
        logits = [float((x[t] * noise[t]) @ gate.weight.detach()[e]) for e in range(EXPERTS)]
        total = sum(math.exp(value) for value in logits)
        best = max(range(EXPERTS), key=lambda e: logits[e])
        argmaxes[best] += 1
        if taken[best] < capacity:
            expected[t, best] = math.exp(logits[best]) / total
            taken[best] += 1
        for e in range(EXPERTS):
            means[e] += math.exp(logits[e]) / total / len(x)
        z_loss += math.log(total) ** 2 / len(x)
    balance = EXPERTS * sum(argmaxes[e] / len(x) * means[e] for e in range(EXPERTS))
    torch.testing.assert_close(combine_matrix(routing), expected)
    assert routing.aux_loss.item() == pytest.approx(0.3 * balance + 0.1 * z_loss)
    assert int(routing.dropped) == len(x) - sum(taken)
    check_shape_of(routing)


def test_gradients_are_those_of_finite_differences() -> None:
    check_gradients(double(SwitchGate(D_MODEL, EXPERTS, z_weight=0.5)), tokens(4))


def test_where_all_tokens_choose_one_expert_it_takes_its_capacity_and_the_others_none() -> None:
    routing = constant_router(double(SwitchGate(D_MODEL, EXPERTS)), [0.0, 0.0, 5.0, 0.0])(same_tokens())
    assert chosen_pairs(routing) == {(t, 2) for t in range(4)}  # 1.25 * 12 / 4 = 3.75 tokens
    assert int(routing.dropped) == 8


@pytest.mark.parametrize(("factor", "kept"), [(0.0, 0), (1e9, 12), (None, 12)])
def test_capacities_of_nothing_and_of_everything(factor: float | None, kept: int) -> None:
    routing = double(SwitchGate(D_MODEL, EXPERTS, capacity_factor=factor))(tokens())
    assert len(chosen_pairs(routing)) == kept
    assert int(routing.dropped) == 12 - kept
    check_shape_of(routing)


def test_the_router_is_computed_in_float32_where_the_model_is_in_bfloat16() -> None:
    gate = SwitchGate(D_MODEL, EXPERTS, jitter=0.0).bfloat16()
    x = tokens(64).bfloat16()
    exact = torch.softmax(x.float() @ gate.weight.detach().float().T, -1)
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            routing = gate(x)
        assert routing.weights.dtype == torch.float32
        expected = exact.gather(1, routing.experts.clamp(max=EXPERTS - 1))
        kept = routing.experts < EXPERTS
        torch.testing.assert_close(routing.weights[kept], expected[kept], rtol=1e-6, atol=0)


def test_in_the_models_own_precision_on_demand() -> None:
    gate = SwitchGate(D_MODEL, EXPERTS, router_dtype=None).bfloat16()
    assert gate(tokens().bfloat16()).weights.dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{"jitter": 1.0}, {"capacity_factor": -1.0}, {"capacity_factor": math.nan}])
def test_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UnsupportedOptionError):
        SwitchGate(D_MODEL, EXPERTS, **options)
