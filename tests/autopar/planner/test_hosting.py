"""Parameters on the host: the promise is measured, the choice is the best, what cannot be is refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

import autopar
from autopar.capture.trace import capture
from autopar.cost_models.compute import host_step_price
from autopar.cost_models.hardware import load_profile
from autopar.errors import ConstraintError, MemoryLimitError, PlanError
from autopar.planner.budget import Budget
from autopar.planner.fit import Fit
from autopar.planner.hosting import Hosting
from autopar.planner.joint import joint_problem
from autopar.planner.make import Options, Planner, plan_program
from autopar.planner.move_buffers import peak_with_moves
from autopar.planner.optimizers import optimizer_of
from autopar.planner.packed_values import Packing
from autopar.planner.prices import Prices
from autopar.planner.residency import USUAL, Residency
from autopar.report.page import report_page
from autopar.search import solve
from autopar.sharding.op_call import TensorSpec

ADAMW = torch.optim.AdamW


def layers(width: int = 64, count: int = 6) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count))), torch.randn(16, width)


class WithScalar(nn.Module):
    """A parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scale * x).sum()


def planned(search: str, word: str = "offload", **keywords: Any) -> autopar.Plan:
    model, x = layers()
    constraints = {"*.weight": word} if word else {}
    return autopar.make_plan(
        model, (2,), example_inputs=x, search=search, optimizer=ADAMW, constraints=constraints, **keywords
    )


@pytest.mark.parametrize("search", ["ddp", "zero2", "fsdp", "megatron"])
def test_every_storage_may_be_on_the_host_and_the_promise_is_measured(search: str) -> None:
    model, x = layers()
    plan, kept = planned(search), planned(search, "")
    report = autopar.verify(model, (2,), example_inputs=x, plan=plan)
    assert report.ok, report.table
    device = plan.peak_bytes - plan.memory["optimizer_state"]
    assert report.peak_bytes == device
    assert plan.peak_bytes < kept.peak_bytes and plan.step_s > kept.step_s
    again = autopar.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again.hash == plan.hash != kept.hash


def test_gradients_and_optimizer_state_go_along() -> None:
    model, x = layers()
    plan, weights = planned("ddp"), 6 * 64 * 64 * 4
    run = autopar.run_virtual(model, (2,), example_inputs=x, plan=plan)
    assert run.host_bytes == (2 * weights, 2 * weights)  # parameters and gradients
    assert plan.host_bytes == 4 * weights
    assert plan.host_memory == {"parameter": weights, "gradient": weights, "optimizer_state": 2 * weights}
    biases = 6 * 64 * 4
    assert plan.memory["parameter"] == biases and plan.memory["optimizer_state"] == 2 * biases
    said = "393 kB on the host (optimizer_state 197 kB, parameter 98.3 kB, gradient 98.3 kB)"
    assert said in str(plan) and said in plan.explain("0.weight") and said in report_page(plan)
    assert "on the host: parameter 0 B -> 98.3 kB" in planned("ddp", "").diff(plan)
    again = autopar.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert (again.host_bytes, again.host_memory) == (plan.host_bytes, plan.host_memory)


def test_plans_that_say_of_the_host_only_how_much_are_read() -> None:
    plan = planned("ddp")
    data = plan.to_json()
    data["schema"] = 3
    del data["predicted"]["host_memory"]
    third = autopar.Plan.from_json(data)
    assert (third.hash, third.host_bytes, third.host_memory) == (plan.hash, plan.host_bytes, {})
    assert "393 kB on the host" in str(third)
    del data["predicted"]["host_bytes"]
    assert autopar.Plan.from_json(data).host_bytes == 0


def test_a_search_puts_parameters_on_the_host_where_nothing_else_fits() -> None:
    model, x = layers(256)
    given: dict[str, Any] = {"example_inputs": x, "optimizer": ADAMW}
    mesh = autopar.Mesh((1,), hardware="a100")
    roomy = autopar.make_plan(model, mesh, **given)
    limit = roomy.peak_bytes // 2
    plan = autopar.make_plan(model, mesh, memory_limit_bytes=limit, **given)
    hosted = {entry.key for entry in plan.entries if entry.kind == "parameter" and entry.residency == "offload"}
    assert 0 < len(hosted) < 6 and plan.peak_bytes <= limit and plan.host_bytes > 0
    assert autopar.verify(model, mesh, example_inputs=x, plan=plan).ok
    with pytest.raises(MemoryLimitError):  # its host is itself
        autopar.make_plan(model, autopar.Mesh((1,), hardware="cpu"), memory_limit_bytes=limit, **given)
    assert not [entry for entry in roomy.entries if entry.residency == "offload"]


def test_layouts_and_what_lies_on_the_host_are_one_choice() -> None:
    model, x = layers(256)
    mesh = autopar.Mesh((2,), hardware="a100")
    limit = autopar.make_plan(model, mesh, example_inputs=x, optimizer=ADAMW).peak_bytes // 4
    plan = autopar.make_plan(model, mesh, example_inputs=x, optimizer=ADAMW, memory_limit_bytes=limit)
    assert plan.peak_bytes <= limit and "offload" in {entry.residency for entry in plan.entries}
    assert autopar.verify(model, mesh, example_inputs=x, plan=plan).ok


def fit_of(host_bytes_per_s: float) -> Fit:
    profile = load_profile("a100")
    profile = replace(profile, device=replace(profile.device, host_bytes_per_s=host_bytes_per_s))
    model, x = layers(128, 4)
    program, mesh = capture(model, (x,), {}), autopar.Mesh((1,), hardware=profile)
    optimizer = optimizer_of(ADAMW)
    plan = plan_program(program, mesh, Options(search="ddp", optimizer=optimizer))
    hosting = Hosting(plan.planning.decisions, Prices(mesh), optimizer)
    packing = Packing(plan.planning.decisions, Prices(mesh), (), hosting)
    return Fit(plan.planning, plan.choice, Prices(mesh), plan.plan.step_s, {}, Budget(30), packing)


def choices(fit: Fit) -> Iterator[Residency]:
    for count in range(len(fit.of.open) + 1):
        for hosted in combinations(fit.of.open, count):
            yield Residency(hosted=frozenset(hosted))


@pytest.mark.parametrize("host_bytes_per_s", [1e9, 1e13])
def test_the_choice_is_the_best_of_all_on_small_graphs(host_bytes_per_s: float) -> None:
    fit = fit_of(host_bytes_per_s)
    kept = fit.measured(USUAL)
    constant = fit.beside(kept)
    foreseen = {residency: float(fit.of.levels(residency, constant).max()) for residency in choices(fit)}
    assert len(foreseen) >= 16
    for limit in sorted({int(bytes_) for bytes_ in foreseen.values()})[::4]:
        best = min(fit.seconds(residency) for residency, bytes_ in foreseen.items() if bytes_ <= limit)
        found, _ = fit.under(limit, kept)
        assert found is not None and found.seconds <= best * (1 + 1e-9) + 1e-3 * fit.step_s


def test_what_is_foreseen_covers_what_is_measured() -> None:
    fit = fit_of(1e13)
    constant = fit.beside(fit.measured(USUAL))
    for residency in list(choices(fit))[::7]:
        foreseen = float(fit.of.levels(residency, constant).max())
        assert (
            fit.measured(residency).measured.peak_bytes <= foreseen <= 1.1 * fit.measured(residency).measured.peak_bytes
        )


@pytest.mark.parametrize("ranks", [1, 2])
def test_layouts_are_searched_in_the_memory_that_pinned_parameters_leave_free(ranks: int) -> None:
    model, x = layers(256)
    program, mesh = capture(model, (x,), {}), autopar.Mesh((ranks,), hardware="a100")
    planner = Planner(program, mesh, Options(optimizer=optimizer_of(ADAMW)))
    pins = dict.fromkeys(planner.hosting.candidates, "offload")
    ddp = planner._hand_plan("ddp")
    free = planner.add("ddp", ddp, planner.as_solution("ddp", ddp))
    hosted = planner.with_residency(free, Residency(hosted=frozenset(pins)))
    joint = joint_problem(planner.planning, pins, planner.packing, 1.1 * hosted.peak_bytes)
    assert joint is not None and hosted.peak_bytes < 0.8 * free.peak_bytes
    found = solve(joint.problem, time_limit_s=10)
    choice, residency = joint.choice(found.choice), joint.residency(found.choice)
    assert residency.hosted == pins.keys()
    own = planner.with_residency(planner.add("joint", choice, planner.as_solution("joint", choice)), residency)
    foreseen = peak_with_moves(planner.planning, joint.problem, found.choice, choice)
    assert 0.95 * own.peak_bytes <= foreseen <= 1.1 * own.peak_bytes


def test_computation_hides_copies_and_a_slow_link_costs_more() -> None:
    fast, slow = fit_of(1e13), fit_of(1e9)
    every = frozenset(fast.of.open)
    assert 0 < fast.seconds(Residency(hosted=every)) < slow.seconds(Residency(hosted=every))


def test_a_saved_plan_is_followed() -> None:
    model, x = layers()
    plan = planned("fsdp")
    again = autopar.make_plan(model, (2,), example_inputs=x, optimizer=ADAMW, plan=plan)
    assert again.hash == plan.hash and (again.peak_bytes, again.host_bytes) == (plan.peak_bytes, plan.host_bytes)


def test_values_on_the_host_are_told_apart_from_parameters() -> None:
    model, x = layers()
    pins = {"*.weight": "offload", "*/tanh#0": "offload"}
    plan = autopar.make_plan(
        nn.Sequential(model, nn.Tanh(), nn.Linear(64, 1)), (1,), example_inputs=x, constraints=pins
    )
    assert plan.host_memory == {"parameter": 4 * (6 * 64 * 64 + 64), "gradient": 4 * (6 * 64 * 64 + 64)}
    alone = autopar.make_plan(
        nn.Sequential(nn.Tanh(), nn.Linear(64, 1)), (1,), example_inputs=x, constraints={"*/tanh#0": "offload"}
    )
    assert alone.host_memory == {"saved": x.nbytes}


def test_half_precision_casts_the_copy_and_scaled_gradients_go_back_wide() -> None:
    model, x = layers()
    plan = planned("fsdp", precision="bf16")
    report = autopar.verify(model, (2,), example_inputs=x, plan=plan, precision="bf16")
    assert report.ok and report.peak_bytes == plan.peak_bytes - plan.memory["optimizer_state"], report.table


SHARDED = functools.partial(autopar.optim.ShardedState, optimizer=ADAMW)
ON_HOST = functools.partial(autopar.optim.HostState, optimizer=ADAMW)


@pytest.mark.parametrize("stage", [1, 2])
def test_state_divided_among_replicas_goes_along(stage: int) -> None:
    model, x = layers()
    optimizer = functools.partial(SHARDED, stage=stage)
    given: dict[str, Any] = {"example_inputs": x, "search": "ddp", "optimizer": optimizer}
    plan = autopar.make_plan(model, (2,), constraints={"*.weight": "offload"}, **given)
    kept = autopar.make_plan(model, (2,), **given)
    weights, biases = 6 * 64 * 64 * 4, 6 * 64 * 4
    assert plan.host_memory == {"parameter": weights, "gradient": weights // stage, "optimizer_state": weights}
    assert plan.memory["optimizer_state"] == biases  # half of two moments
    assert plan.peak_bytes < kept.peak_bytes and plan.step_s > kept.step_s
    report = autopar.verify(model, (2,), example_inputs=x, plan=plan, optimizer=optimizer)
    assert report.ok and report.peak_bytes == plan.peak_bytes - biases, report.table
    run = autopar.run_virtual(model, (2,), example_inputs=x, plan=plan, optimizer=optimizer)
    assert run.host_bytes == (plan.host_bytes - weights,) * 2


def test_state_of_replicas_that_lies_on_the_host_by_itself_is_counted_once() -> None:
    model, x = layers()
    optimizer = functools.partial(autopar.optim.ShardedState, optimizer=ON_HOST)
    given: dict[str, Any] = {"example_inputs": x, "search": "ddp", "optimizer": optimizer}
    weights, biases = 6 * 64 * 64 * 4, 6 * 64 * 4
    plan = autopar.make_plan(model, (2,), constraints={"*.weight": "offload"}, **given)
    assert plan.host_memory["optimizer_state"] == weights + biases


def test_replicas_gather_what_they_step_over_the_host_link() -> None:
    profile = load_profile("a100")
    prices, spec = Prices(autopar.Mesh((4,), hardware=profile)), TensorSpec((1 << 20,), torch.float32, (1,))
    whole, part = optimizer_of(ADAMW), optimizer_of(SHARDED)
    layout = (Replicate(),)
    step_s = host_step_price(profile.device, 1 << 20, 1 << 20, 1 << 21).value
    more_s = prices.hosted_optimizer(part, spec, layout) - step_s
    copies_s = prices.host_copy(1 << 20) + prices.host_copy(1 << 22)
    assert copies_s < more_s < copies_s + prices.optimizer(part, spec, layout)
    assert prices.hosted_optimizer(whole, spec, layout) == pytest.approx(4 * step_s, rel=1e-2)


def test_what_cannot_lie_on_the_host_is_refused() -> None:
    model, x = layers()
    with pytest.raises(ConstraintError, match="it has no dims, or nothing reads it"):
        autopar.make_plan(WithScalar(), (2,), example_inputs=x, constraints={"scale": "offload"})
    data = planned("ddp", "").to_json()
    data["residency"] = {"0.weight": "compress"}
    with pytest.raises(PlanError, match="it is a parameter"):
        autopar.make_plan(model, (2,), example_inputs=x, plan=autopar.Plan.from_json(data))
