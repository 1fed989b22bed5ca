"""Pipelines that are given: a saved plan followed, or stages kept for other shapes and modes of their model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from autopar.capture.program import BETWEEN_STAGES, InputKind, Program
from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.plan_entries import ACCUMULATED
from autopar.planner.build import PlanningProblem
from autopar.planner.cut_answers import CutAnswers
from autopar.planner.cuts import cuts_like
from autopar.planner.follow import price_choice
from autopar.planner.hosting import Hosting, SharedParameters
from autopar.planner.make import Options
from autopar.planner.pipeline import plan_stages
from autopar.planner.pipeline_plan import PlannedPipeline, finished
from autopar.planner.pipeline_request import PipelineRequest, pipeline_axis, without_axis
from autopar.planner.pipeline_search import PipelineSearch
from autopar.planner.residency import Residency
from autopar.planner.resolve import residency_of, resolve, what_was_recomputed
from autopar.planner.stage_hosting import kept_on_devices, refuse_two_places
from autopar.schedules.actions import Schedule
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout import Layout
from autopar.stages.accumulated import accumulated_microbatches
from autopar.stages.assign import Anatomy, anatomy
from autopar.stages.microbatch import batch_size, cut_microbatches
from autopar.stages.staged import Staged, stage_program


def plan_pipeline_like(
    program: Program,
    mesh: Mesh,
    options: Options,
    like: Staged,
    schedule: Schedule,
    assignments: Sequence[Assignment],
    request: PipelineRequest,
) -> PlannedPipeline:
    """A pipeline for other shapes or modes of a model whose parameters lie already: same stages, same layouts."""
    axis, options = pipeline_axis(mesh, len(like.stages)), options.of_stages
    assert axis is not None
    rules, inner = options.rule_book(mesh), without_axis(mesh, axis)
    layouts, hosted = dict[str, Layout](), set[str]()
    for stage, assignment in zip(like.stages, assignments, strict=True):
        for item in stage.program.inputs:
            if item.kind is InputKind.PARAMETER:
                layouts[item.name] = assignment.inputs[item.node]
                hosted |= {item.name} if item.node in assignment.hosted else set()
    count = min(schedule.microbatches, max(1, batch_size(program)))
    if request.accumulated:
        assert request.microbatches is not None
        count = request.microbatches
        pieces = accumulated_microbatches(program, count)
    else:
        pieces = cut_microbatches(program, count, rules.rules_of)
    staged = stage_program(pieces, cuts_like(anatomy(pieces.pieces[0]), like))
    lies = replace(options, parameter_layouts=layouts, hosted=frozenset(hosted), constraints=())
    planned = plan_stages(staged, inner, lies)
    name = schedule.name if schedule.synchronous else "1f1b"
    own = PipelineRequest(len(like.stages), name, count, request.accumulated)
    return finished(mesh, axis, staged, planned, rules, options, own)


def follow_pipeline(program: Program, mesh: Mesh, options: Options, plan: Plan) -> PlannedPipeline:
    """A given plan with stages, checked against the program and priced anew."""
    options = options.of_stages
    pipeline = plan.pipeline
    assert pipeline is not None
    if plan.mesh_shape != mesh.shape:
        raise PlanError(
            f"the plan is for a mesh of {plan.mesh_shape}, this mesh is {mesh.shape}", fix="plan again for this mesh"
        )
    accumulated = pipeline.batch_semantics == ACCUMULATED
    request = PipelineRequest(len(plan.stages), pipeline.schedule, pipeline.microbatches, accumulated)
    rules, inner = options.rule_book(mesh), without_axis(mesh, pipeline.axis)
    pieces = request.pieces(program, pipeline.microbatches, rules.rules_of)
    staged = stage_program(pieces, _cuts_at(anatomy(pieces.pieces[0]), plan))
    layouts = _boundary_of(plan)
    shared = SharedParameters(frozenset(staged.first.shared))
    spread = replace(options, microbatches=pieces.of_a_step, kept_on_device=kept_on_devices(staged), shared=shared)
    planned = tuple(
        price_choice(stage.program, inner, spread, partial(_picked, plan=own.plan, layouts=layouts), plan.search)
        for stage, own in zip(staged.stages, plan.stages, strict=True)
    )
    refuse_two_places(staged, planned)
    found = finished(mesh, pipeline.axis, staged, planned, rules, options, request)
    again = request if request.are_batches else PipelineRequest(len(plan.stages))
    search = PipelineSearch(program, mesh, pipeline.axis, options, again, rules)
    cutting = CutAnswers(search, pipeline.microbatches, pipeline.schedule, staged.cuts)
    notes = (*found.plan.notes, *what_was_recomputed(plan, found.plan))
    return replace(found, plan=replace(found.plan, notes=notes, cutting=cutting))


def _picked(
    planning: PlanningProblem, hosting: Hosting, *, plan: Plan, layouts: Mapping[str, Layout]
) -> tuple[tuple[int, ...], Residency]:
    return resolve(planning, plan, layouts), residency_of(planning.decisions, plan, hosting)


def _cuts_at(found: Anatomy, plan: Plan) -> tuple[int, ...]:
    """The places at which a plan's stages begin. Raises PlanError where the program has no such op."""
    places_by_key = {node.meta["key"]: index for index, node in enumerate(found.forward)}
    cuts = []
    for stage in plan.stages[1:]:
        if stage.starts not in places_by_key:
            raise PlanError(
                f"the plan begins stage {stage.number} at {stage.starts!r}, which this program does not have",
                fix="plan again: the model, the shapes of its inputs or train/eval mode differ",
            )
        cuts.append(places_by_key[stage.starts])
    if cuts != sorted(set(cuts)):
        raise PlanError("the plan's stages do not follow each other", fix="plan again")
    return tuple(cuts)


def _boundary_of(plan: Plan) -> dict[str, Layout]:
    """How values leave each stage: as the stage that reads them takes them."""
    layouts: dict[str, Layout] = {}
    for entry in plan.every_entry:
        kind, _, name = entry.key.partition(":")
        if kind == "arriving":
            layouts[f"leaving:{name}"] = entry.outputs[0]
        elif kind == "tangent" and name.startswith(BETWEEN_STAGES):
            layouts[f"gradient:{name}"] = entry.outputs[0]
    return layouts
