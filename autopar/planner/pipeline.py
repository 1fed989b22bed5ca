"""A plan with a pipeline: microbatches, cuts, a plan for each stage, a schedule."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.capture.program import InputKind, OutputKind, Program
from autopar.errors import ConstraintError, InputError, MemoryLimitError, MeshError, MicrobatchError, PlanError
from autopar.mesh import Mesh
from autopar.planner.constraints import Constraint
from autopar.planner.cuts import balanced_cuts, places
from autopar.planner.decisions import result_key
from autopar.planner.make import MEMORY_FRACTION, Options, Planned, plan_program
from autopar.planner.pipeline_plan import PlannedPipeline, finished
from autopar.planner.pipeline_request import (
    V_SHAPED,
    PipelineRequest,
    pipeline_axis,
    rank_limits,
    rank_speeds,
    without_axis,
)
from autopar.planner.prices import Prices
from autopar.schedules.actions import Placement, rank_of
from autopar.sharding.discovery.book import RuleBook
from autopar.sharding.layout import Layout
from autopar.stages.assign import anatomy
from autopar.stages.microbatch import Microbatches, batch_size, cut_microbatches, independent_microbatches
from autopar.stages.stage_programs import StageProgram
from autopar.stages.staged import Staged, stage_program

FITTING_ROUNDS = 3  # how often stages are planned again where microbatches in flight exceed the memory


def cut_at_equal_times(pieces: Microbatches, mesh: Mesh, speeds: Sequence[float]) -> Staged:
    """Stages of equal time by the planner's prices, on devices of these speeds."""
    found = anatomy(pieces.pieces[0])
    cuts = balanced_cuts(places(found, Prices(mesh)), len(speeds), speeds) if len(speeds) > 1 else ()
    return stage_program(pieces, cuts)


def plan_stages(
    staged: Staged, mesh: Mesh, options: Options, limits_bytes: Sequence[int] | None = None
) -> tuple[Planned, ...]:
    """A plan for each stage on its own mesh; what goes between two of them lies the same on both sides.

    `limits_bytes`: of each stage, for one microbatch.
    """
    boundary: dict[str, Layout] = {}
    shared: dict[str, Layout] = {}
    found = []
    constraints = _by_stage(staged.stages, options.constraints)
    for stage, own in zip(staged.stages, constraints, strict=True):
        known = {key: layout for key, layout in boundary.items() if key in boundary_keys(stage.program)}
        fixed = {**shared, **(options.parameter_layouts or {})}
        planned = plan_program(
            stage.program,
            mesh,
            replace(
                options,
                constraints=own,
                parameter_layouts=fixed or None,
                boundary_layouts=known,
                time_limit_s=options.time_limit_s / len(staged.stages),
                memory_limit_bytes=options.memory_limit_bytes if limits_bytes is None else limits_bytes[stage.index],
            ),
        )
        found.append(planned)
        boundary.update(offered_layouts(stage.program, planned))
        shared.update(_parameter_layouts(stage.program, planned, staged.variants[0].shared))
    return tuple(found)


def boundary_keys(program: Program) -> set[str]:
    """The keys of the decisions in which layouts a stage's values arrive and are given back."""
    arriving = {f"arriving:{item.name}" for item in program.inputs if item.kind is InputKind.ARRIVING}
    return arriving | {result_key(output) for output in program.outputs if output.is_between_stages}


def offered_layouts(program: Program, planned: Planned) -> dict[str, Layout]:
    """What a stage's plan fixes for later stages: how its values leave, and how it takes gradients of them."""
    layouts: dict[str, Layout] = {}
    for output, layout in zip(program.outputs, planned.assignment.outputs, strict=True):
        if output.kind is OutputKind.LEAVING and layout is not None:
            layouts[f"arriving:{output.name}"] = layout
    for item in program.inputs:
        if item.kind is InputKind.TANGENT:
            layouts[f"gradient:{item.name}"] = planned.assignment.inputs[item.node]
    return layouts


def _parameter_layouts(program: Program, planned: Planned, shared: Mapping[str, tuple[int, ...]]) -> dict[str, Layout]:
    """The layouts of parameters that other stages hold too."""
    inputs = [item for item in program.inputs if item.kind is InputKind.PARAMETER and item.name in shared]
    return {item.name: planned.assignment.inputs[item.node] for item in inputs}


def _by_stage(stages: Sequence[StageProgram], constraints: tuple[Constraint, ...]) -> list[tuple[Constraint, ...]]:
    """The constraints that match something, stage by stage. Raises ConstraintError for one that matches nowhere."""
    names = [_names(stage.program) for stage in stages]
    for item in constraints:
        if not any(_matches(item, known) for known in names):
            raise ConstraintError(
                f"the constraint {item.pattern!r} matches no parameter, input or op of any stage",
                fix="use the names of model.named_parameters(), `input:0`, or `module/op#0` as the plan prints them",
            )
    return [tuple(item for item in constraints if _matches(item, known)) for known in names]


def _names(program: Program) -> set[str]:
    kinds = (InputKind.PARAMETER, InputKind.INPUT)
    names = {name for item in program.inputs if item.kind in kinds for name in (item.name, f"input:{item.name}")}
    return names | {node.meta["key"] for node in program.graph_module.graph.nodes if node.op == "call_function"}


def _matches(constraint: Constraint, names: set[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, constraint.pattern) for name in names)


def plan_pipeline(program: Program, mesh: Mesh, options: Options, request: PipelineRequest) -> PlannedPipeline:
    """Plan a program as a pipeline along one axis of the mesh."""
    _refuse_input_gradients(program)
    axis = pipeline_axis(mesh, request.stages)
    assert axis is not None, "no axis of the mesh is the pipeline's"
    ranks, inner = mesh.shape[axis], without_axis(mesh, axis)
    stages = request.stages or ranks * (2 if request.schedule in V_SHAPED else 1)
    if stages % ranks:
        raise MeshError(
            f"{stages} stages do not lie evenly on the {ranks} ranks of axis {mesh.axis_names[axis]!r}",
            fix=f"use a multiple of {ranks} stages",
        )
    rules = options.rule_book(mesh)
    placement: Placement = "v" if request.schedule in V_SHAPED else "loop"
    by_rank = rank_speeds(mesh, axis)
    speeds = [by_rank[rank_of(stage, ranks, placement)] for stage in range(stages)]
    staged = _staged(program, inner, speeds, request, rules)
    limits = rank_limits(mesh, axis, options.memory_limit_bytes, MEMORY_FRACTION)
    own = [limits[rank_of(stage, ranks, placement)] for stage in range(stages)]
    result = finished(mesh, axis, staged, plan_stages(staged, inner, options, own), rules, options, request)
    for _ in range(FITTING_ROUNDS):
        if _fits(result, limits):
            return result
        own = _tighter(result, limits)
        result = finished(mesh, axis, staged, plan_stages(staged, inner, options, own), rules, options, request)
    if not _fits(result, limits):
        raise MemoryLimitError(
            f"the fullest rank needs {result.plan.peak_bytes} bytes with its microbatches in flight, "
            f"{min(limits)} are allowed",
            fix="use more microbatches, more stages, or 1f1b, which holds the fewest",
        )
    return result


def _fits(result: PlannedPipeline, limits: Sequence[int]) -> bool:
    return all(used <= limit for used, limit in zip(result.rank_peaks, limits, strict=True))


def _tighter(result: PlannedPipeline, limits: Sequence[int]) -> list[int]:
    """What each stage may hold for one microbatch, so that its rank keeps to its limit with all that are in flight."""
    used, chunks, own = result.rank_peaks, result.schedule.virtual_stages, []
    for stage in result.plan.stages:
        over = used[stage.rank] - limits[stage.rank]
        share = limits[stage.rank] / used[stage.rank]
        own.append(int(stage.plan.peak_bytes * share) if over > 0 else stage.plan.peak_bytes - over // chunks)
    return [max(1, limit) for limit in own]


def _staged(program: Program, mesh: Mesh, speeds: Sequence[float], request: PipelineRequest, rules: RuleBook) -> Staged:
    """With the microbatches asked for, or as many as two per stage where the program can be cut so.

    For an asynchronous schedule `program` is that of one microbatch. `speeds`: of the stages' devices.
    """
    stages = len(speeds)
    if request.is_asynchronous:
        staged = cut_at_equal_times(independent_microbatches(program, request.microbatches or stages), mesh, speeds)
        _refuse_shared(staged, request)
        return staged
    if request.microbatches is not None:
        return cut_at_equal_times(cut_microbatches(program, request.microbatches, rules.rules_of), mesh, speeds)
    size = batch_size(program)
    count = max(count for count in range(1, max(1, min(size, 2 * stages)) + 1) if size % count == 0)
    try:
        pieces = cut_microbatches(program, count, rules.rules_of)
    except MicrobatchError:
        pieces = cut_microbatches(program, 1, rules.rules_of)
    return cut_at_equal_times(pieces, mesh, speeds)


def _refuse_input_gradients(program: Program) -> None:
    for output in program.outputs:
        if output.kind is OutputKind.GRADIENT and output.name.startswith("input:"):
            raise InputError(
                f"{output.name.removeprefix('input:')!r} requires a gradient, which a pipeline does not return",
                fix="detach it, or compute what leads to it inside of the model",
            )


def _refuse_shared(staged: Staged, request: PipelineRequest) -> None:
    losses = [output for output in staged.program.outputs if output.kind is OutputKind.LOSS]
    if len(losses) != 1:
        raise PlanError(
            f"{request.schedule} needs the loss inside of the model: microbatches go back as soon as they are through",
            fix="return the loss from the model, or use a synchronous schedule",
        )
    if staged.first.shared:
        name, stages = next(iter(staged.first.shared.items()))
        raise PlanError(
            f"{name!r} is shared by stages {', '.join(map(str, stages))}, which {request.schedule} updates at "
            "different times",
            fix="use a synchronous schedule, or untie the parameter",
        )
