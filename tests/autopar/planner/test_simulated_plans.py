"""What is foreseen of a plan agrees with the emitted program, walked by the simulator."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.capture.program import Program
from autopar.capture.trace import capture
from autopar.commands import add_commands
from autopar.cost_models.hardware import load_profile
from autopar.cost_models.simulator import Simulation, simulate
from autopar.errors import PlanError
from autopar.passes.collectives import is_collective
from autopar.passes.pipeline import emit
from autopar.planner.build import PlanningProblem, build_problem
from autopar.planner.decisions import NO_OPTIMIZER, DecisionList
from autopar.planner.emitted_ops import emitted_ops
from autopar.planner.hand_plans import hand_plan
from autopar.planner.measure import measured_program, plan_entries, predicted_step_s
from autopar.planner.node_prices import computes, is_view, node_seconds, origin_geometry
from autopar.planner.prices import Prices
from autopar.search import evaluate, solve

PLANS = ("ddp", "fsdp", "megatron", "ilp")


class Block(nn.Module):
    """Norm, two products, a residual; wide enough that a collective can hide behind a product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(2048), nn.Linear(2048, 4096), nn.Linear(4096, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


@cache
def program() -> Program:
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block(), nn.Linear(2048, 2048))
        return capture(model, (torch.empty(8, 1024, 2048),), {})


@cache
def planned(mesh_shape: tuple[int, ...], overlap: float = 1.0) -> tuple[PlanningProblem, Prices]:
    profile = replace(load_profile("h100"), overlap=overlap)
    prices = Prices(autopar.Mesh(mesh_shape, hardware=profile))
    decisions = DecisionList(program(), prices, NO_OPTIMIZER).build()
    return build_problem(program(), decisions, prices, usage_limit=None), prices


@cache
def choice_of(name: str, mesh_shape: tuple[int, ...], overlap: float = 1.0) -> tuple[int, ...]:
    planning, _ = planned(mesh_shape, overlap)
    if name == "ilp":
        return solve(planning.problem, time_limit_s=20).choice
    return hand_plan(planning, name, time_limit_s=20, seed=0)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
def test_every_node_costs_what_its_decision_was_priced_at(name: str, mesh_shape: tuple[int, ...]) -> None:
    (planning, prices), choice = planned(mesh_shape), choice_of(name, mesh_shape)
    local = emit(program(), planning.assignment(choice), origin_geometry(mesh_shape))
    assert local.backward is not None
    nodes = [*local.forward.graph.nodes, *local.backward.graph.nodes]
    costs = [(node_seconds(node, prices, local.geometry), "move" in node.meta) for node in nodes]
    assert any(cost for cost, _ in costs)
    decided = sum(float(item.seconds[pick]) for item, pick in zip(planning.decisions, choice, strict=True)
                  if item.kind == "op")  # fmt: skip
    moved = sum(move.seconds for entry in plan_entries(planning, choice, prices) for move in entry.moves)
    assert sum(cost for cost, in_move in costs if not in_move) == pytest.approx(decided, rel=0.02)
    assert sum(cost for cost, in_move in costs if in_move) == pytest.approx(moved, rel=0.02)


@pytest.mark.parametrize("overlap", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("name", PLANS)
def test_what_is_foreseen_of_a_step_is_what_the_simulator_finds(name: str, overlap: float) -> None:
    (planning, prices), choice = planned((4,), overlap), choice_of(name, (4,), overlap)
    simulated = measured_program(planning, choice).step_ops(prices, NO_OPTIMIZER)
    assert simulated.overlap == overlap
    optimizer_s = sum(op.seconds for op in simulated.ops if op.name.startswith("update"))
    assert optimizer_s > 0
    assert predicted_step_s(planning, choice, prices) == pytest.approx(simulated.step_s, rel=0.06)


def test_hidden_communication_costs_less_and_never_less_than_nothing() -> None:
    """The sums of gradients are free where there is enough to compute, and cost their time where nothing overlaps."""
    (free, prices), (bound, _) = planned((4,)), planned((4,), 0.0)
    ddp = choice_of("ddp", (4,))
    compute_s = sum(float(costs[pick]) for costs, pick in zip(free.problem.costs, ddp, strict=True))
    hidden, exposed = evaluate(free.problem, ddp), evaluate(bound.problem, ddp)
    assert compute_s < hidden < compute_s + 0.4 * (exposed - compute_s)
    assert all((matrix >= 0).all() for matrix in free.problem.edge_costs)
    pairs = zip(free.problem.edge_costs, bound.problem.edge_costs, strict=True)
    assert all((with_overlap <= without).all() for with_overlap, without in pairs)
    assert prices.mesh.profile.overlap == 1.0


def test_a_walk_has_each_collective_of_the_graphs_once_and_no_views() -> None:
    (planning, prices), choice = planned((2, 2)), choice_of("fsdp", (2, 2))
    local = emit(program(), planning.assignment(choice), origin_geometry((2, 2)))
    assert local.backward is not None
    nodes = [*local.forward.graph.nodes, *local.backward.graph.nodes]
    ops = emitted_ops(local, prices, NO_OPTIMIZER)
    communication = [op.name for op in ops if op.kind == "communication"]
    assert sorted(communication) == sorted(node.name for node in nodes if is_collective(node))
    computed = {node.name for node in nodes if computes(node)}
    assert {op.name for op in ops if op.kind == "compute"} >= computed
    assert not [op for op in ops if op.seconds <= 0]
    assert not [node for node in nodes if node.name in computed and str(node.target).startswith("aten.view")]


def test_where_views_have_a_price_they_and_the_call_are_walked_too() -> None:
    (planning, prices), choice = planned((2, 2)), choice_of("fsdp", (2, 2))
    device = replace(prices.mesh.profile.device, view_s=3e-6)
    priced = Prices(autopar.Mesh((2, 2), hardware=replace(prices.mesh.profile, device=device)))
    local = emit(program(), planning.assignment(choice), origin_geometry((2, 2)))
    assert local.backward is not None
    views = [node for gm in (local.forward, local.backward) for node in gm.graph.nodes if is_view(node)]
    before, after = (emitted_ops(local, each, NO_OPTIMIZER) for each in (prices, priced))
    assert after[0].name == "call"
    assert after[0].seconds > 1e-4  # the collective that compares the calls, and all parameters
    assert views
    assert {op.name for op in after} - {op.name for op in before} == {"call", *(node.name for node in views)}
    assert sum(op.seconds for op in after[1:]) - sum(op.seconds for op in before) == pytest.approx(3e-6 * len(views))
    assert all(node_seconds(node, priced, local.geometry) == 3e-6 for node in views)


@pytest.mark.parametrize("name", PLANS)
def test_what_is_waited_for_too_soon_is_hidden_by_nothing(name: str) -> None:
    (planning, prices), choice = planned((4,)), choice_of(name, (4,))
    local = emit(program(), planning.assignment(choice), origin_geometry((4,)))
    profile = prices.mesh.profile

    def walked(**changes: float) -> Simulation:
        given = Prices(autopar.Mesh((4,), hardware=replace(profile, **changes)))
        return simulate(emitted_ops(local, given, NO_OPTIMIZER), overlap=given.mesh.profile.overlap)

    at_once, late, nothing = walked(), walked(overlap_after_s=1.0), walked(overlap=0.0)
    between = walked(overlap_after_s=at_once.step_s / 10)
    assert at_once.step_s < nothing.step_s
    assert late.step_s == pytest.approx(nothing.step_s)
    assert at_once.step_s <= between.step_s <= late.step_s


def test_the_search_counts_on_hiding_only_what_is_waited_for_late() -> None:
    profile = replace(load_profile("h100"), overlap_after_s=1.0)
    prices = Prices(autopar.Mesh((4,), hardware=profile))
    decisions = DecisionList(program(), prices, NO_OPTIMIZER).build()
    late, (nothing, _) = build_problem(program(), decisions, prices, usage_limit=None), planned((4,), 0.0)
    pairs = zip(late.problem.edge_costs, nothing.problem.edge_costs, strict=True)
    assert all(np.array_equal(one, other) for one, other in pairs)


def make(**options: Any) -> autopar.Plan:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    mesh = autopar.Mesh((2, 2), ("dp", "tp"), hardware="h100")
    return autopar.make_plan(model, mesh, example_inputs=torch.randn(32, 64), **options)


def test_a_plans_step_is_the_simulated_one_and_its_trace_can_be_saved(tmp_path: Path) -> None:
    plan = make(search="ddp")
    run = plan.simulate()
    assert plan.step_s == run.step_s == plan.alternatives["ddp"]
    assert f"step {1e3 * run.step_s:.4g} ms" in str(run)
    run.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} >= {"compute", "communication, axis dp"}
    details = [event["args"]["detail"] for event in events if event["name"].startswith("all_reduce")]
    assert any("_c10d_functional.all_reduce.default" in detail for detail in details)


def test_stragglers_slow_the_step_of_every_rank() -> None:
    plan = make(search="ddp")
    slow = plan.simulate(rank_speeds=(1, 1, 0.5))
    assert plan.step_s < slow.step_s
    assert slow.idle_s[0] > 0
    assert set(slow.compute_s) == {0, 1, 2, 3}


def test_a_hand_plan_given_as_placements_is_priced_and_a_loaded_one_asks_to_be(tmp_path: Path) -> None:
    pinned = make(constraints={"0.weight": "R,S0", "2.weight": "R,S1", "input:0": "S0,R"})
    assert pinned.simulate().step_s == pinned.step_s
    pinned.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="loaded, not emitted"):
        loaded.simulate()
    assert make(plan=loaded).simulate().step_s == pinned.step_s


def tiny() -> tuple[nn.Module, torch.Tensor]:
    """A model for the command."""
    return nn.Linear(8, 8), torch.ones(4, 8)


def test_the_command_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    trace = tmp_path / "trace.json"
    words = ["plan", f"{__name__}:tiny", "--mesh", "2", "--search", "ddp", "--trace", str(trace)]
    chosen = parser.parse_args(words)
    chosen.json = False
    assert chosen.run(chosen) == 0
    assert json.loads(trace.read_text())["traceEvents"]
    assert "autopar plan" in capsys.readouterr().out
