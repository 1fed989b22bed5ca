"""The plan of a pipeline from those of its stages: the schedule, its simulated step, memory with all in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.capture.program import InputKind, Program
from autopar.cost_models.hardware import axis_links
from autopar.cost_models.simulator import Simulation
from autopar.mesh import Mesh
from autopar.plan import Plan, StagePlan
from autopar.plan_details import MAX_BARS, Bar, PlanDetails
from autopar.plan_entries import Pipeline
from autopar.planner.emitted_ops import SENT, UPDATE
from autopar.planner.later_microbatches import refuse_uneven
from autopar.planner.make import MEMORY_FRACTION, Options, Planned
from autopar.planner.pipeline_request import PipelineRequest, rank_limits, rank_speeds, without_axis
from autopar.planner.program_hash import program_hash
from autopar.planner.rank_memory import rank_peaks
from autopar.planner.stage_hosting import rank_host_memory
from autopar.planner.stage_memory import call_bytes
from autopar.planner.stage_plans import StageCosts, stage_costs
from autopar.schedules.actions import Schedule
from autopar.schedules.generate import Request, generate
from autopar.schedules.memory import in_flight
from autopar.schedules.timing import bubble_fraction, simulate_schedule
from autopar.sharding.discovery.book import RuleBook
from autopar.stages.assign import anatomy
from autopar.stages.staged import Staged


@dataclass(frozen=True)
class PlannedPipeline:
    """A plan with stages, and all that running it needs."""

    plan: Plan
    staged: Staged
    schedule: Schedule
    stages: tuple[Planned, ...]
    rules: RuleBook  # of the whole program
    axis: int
    rank_peaks: tuple[int, ...]  # bytes of each pipeline rank, all its microbatches in flight included


def finished(
    mesh: Mesh,
    axis: int,
    staged: Staged,
    planned: tuple[Planned, ...],
    rules: RuleBook,
    options: Options,
    request: PipelineRequest,
) -> PlannedPipeline:
    """The stages' plans with their schedule, as one plan. Raises NotDivisibleError for a last microbatch that the ranks
    of a stage cannot share."""
    refuse_uneven(staged, planned)
    inner = without_axis(mesh, axis)
    link = axis_links(mesh.profile, mesh.shape)[axis]
    costs = [stage_costs(staged, stage, item, inner, link) for stage, item in enumerate(planned)]
    limits = rank_limits(mesh, axis, options.memory_limit_bytes, MEMORY_FRACTION)
    schedule = make_schedule(staged, costs, limits, request)
    times = dict(enumerate(item.times for item in costs))
    simulation = simulate_schedule(schedule, times, rank_speeds=rank_speeds(mesh, axis))
    held = _in_flight(staged, schedule)
    always = call_bytes(staged)
    host_memory = rank_host_memory(schedule, planned, held)
    most = tuple(always + bytes_ for bytes_ in rank_peaks(staged, schedule, [cost.storages for cost in costs]))
    plan = Plan(
        mesh_shape=mesh.shape,
        axis_names=mesh.axis_names,
        hardware=mesh.profile.name,
        search=planned[0].plan.search,
        model_hash=program_hash(staged.program),
        entries=(),
        step_s=simulation.step_s
        + max(cost.reduce_s + _update_s(item) for cost, item in zip(costs, planned, strict=True)),
        peak_bytes=max(most),
        host_bytes=sum(host_memory.values()),
        host_memory=host_memory,
        memory_limit_bytes=options.limit(mesh),
        optimizer=options.optimizer.name,
        cost=sum(item.plan.cost for item in planned),
        bound=sum(item.plan.bound for item in planned),
        notes=staged.program.notes,
        without_rule=tuple(dict.fromkeys(op for item in planned for op in item.plan.without_rule)),
        stages=_stage_plans(staged, schedule, planned, costs, held),
        pipeline=_pipeline(axis, schedule, simulation, request),
        details=PlanDetails(chart=_chart(simulation)),
    )
    return PlannedPipeline(plan, staged, schedule, planned, rules, axis, most)


def _in_flight(staged: Staged, schedule: Schedule) -> tuple[int, ...]:
    """By stage, the microbatches that are in flight at most: all where the loss is computed outside, of all outputs."""
    if staged.has_loss or not schedule.synchronous:
        return tuple(in_flight(schedule))
    return (schedule.microbatches,) * schedule.stages


def _pipeline(axis: int, schedule: Schedule, simulation: Simulation, request: PipelineRequest) -> Pipeline:
    name, bubble = request.schedule or schedule.name, bubble_fraction(simulation)
    return Pipeline(axis, name, schedule.microbatches, schedule.virtual_stages, bubble, request.semantics)


def _chart(simulation: Simulation) -> tuple[Bar, ...]:
    """What every rank computes, and when; none of a schedule that is too long to be looked at."""
    bars = []
    for op, start, end in zip(simulation.ops, simulation.starts_s.tolist(), simulation.ends_s.tolist(), strict=True):
        if op.kind == "compute":
            kind, _, place = op.name.partition(" ")
            stage, _, microbatch = place.partition(".")
            bars.append(Bar(kind, op.rank, int(stage), int(microbatch), start, end))
    return tuple(bars) if len(bars) <= MAX_BARS else ()


def _stage_plans(
    staged: Staged,
    schedule: Schedule,
    planned: Sequence[Planned],
    costs: Sequence[StageCosts],
    held: Sequence[int],
) -> tuple[StagePlan, ...]:
    starts = ["", *(node.meta["key"] for node in _starts(staged))]
    return tuple(
        StagePlan(
            number=stage,
            rank=schedule.rank_of(stage),
            starts=starts[stage],
            plan=item.plan,
            parameters=parameter_names(staged.stages[stage].program),
            forward_s=costs[stage].times.forward_s,
            backward_input_s=costs[stage].times.backward_input_s,
            backward_weight_s=costs[stage].times.backward_weight_s,
            in_flight=held[stage],
            activation_bytes=math.ceil(costs[stage].memory.activation_bytes),
            sent_bytes=costs[stage].sent_bytes,
        )
        for stage, item in enumerate(planned)
    )


def parameter_names(program: Program) -> tuple[str, ...]:
    """The parameters of a program."""
    return tuple(item.name for item in program.inputs if item.kind is InputKind.PARAMETER)


def _starts(staged: Staged) -> list[fx.Node]:
    forward = anatomy(staged.microbatches.pieces[0]).forward
    return [forward[cut] for cut in staged.cuts]


def _update_s(planned: Planned) -> float:
    step = planned.plan.step_ops
    shares = sum(op.seconds for op in step.ops if op.name.startswith((UPDATE, SENT))) if step is not None else 0.0
    return shares * planned.planner.prices.microbatches


def make_schedule(
    staged: Staged, costs: Sequence[StageCosts], limits_bytes: Sequence[int], request: PipelineRequest
) -> Schedule:
    """The schedule asked for, or 1F1B, interleaved where ranks have several stages. `limits_bytes`: of each rank."""
    stages, ranks, count = len(staged.stages), len(limits_bytes), staged.microbatches.count
    name = request.schedule or ("1f1b" if stages == ranks else "interleaved")
    always = call_bytes(staged)
    asked = Request(
        stages,
        count,
        stages // ranks,
        times=dict(enumerate(item.times for item in costs)),
        memory={stage: cost.memory for stage, cost in enumerate(costs)},
        limits_bytes=[limit - always for limit in limits_bytes] if name == "auto" else (),
        edges=staged.first.edges,
    )
    return generate(name, asked)
