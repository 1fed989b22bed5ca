"""The compiler behind a parallel module: capture, plan, emit; the first rank plans, the others take its plan."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.capture.program import Program
from autopar.capture.trace import capture
from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.passes.expert_places import ExpertPlaces, Groups
from autopar.passes.local_call import RankGeometry
from autopar.passes.pipeline import LocalProgram, emit
from autopar.plan import Plan
from autopar.planner.build import PlanningProblem
from autopar.planner.expert_places import bytes_of_copies, place_anew
from autopar.planner.follow import price_choice
from autopar.planner.hosting import Hosting
from autopar.planner.make import Options, Planned, plan_program
from autopar.planner.pipeline import plan_pipeline
from autopar.planner.pipeline_again import follow_pipeline, plan_pipeline_like
from autopar.planner.pipeline_plan import PlannedPipeline
from autopar.planner.pipeline_request import PipelineRequest
from autopar.planner.program_hash import program_hash
from autopar.planner.residency import Residency
from autopar.planner.resolve import residency_of, resolve, what_was_recomputed
from autopar.runtime.checks import RankGroup
from autopar.runtime.inputs import first_microbatch, microbatches_of
from autopar.runtime.pipeline.module import CompiledPipeline
from autopar.runtime.pipeline.step import PipelineStep
from autopar.runtime.step import CompiledStep, PlanLike
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout import Layout
from autopar.stages.accumulated import accumulated_microbatches
from autopar.stages.microbatch import cut_as, independent_microbatches
from autopar.stages.staged import stage_program


class PlacesExperts:
    """What both compilers know of experts."""

    def place_experts(
        self,
        load: Sequence[Sequence[float]],
        current: Sequence[ExpertPlaces],
        *,
        replicas: int | None,
        move_cost: float,
        time_limit_s: float,
    ) -> Sequence[tuple[Groups, Groups]]:
        """See `ExpertCompiler`."""
        computed, owned = [item.computed for item in current], [item.owned for item in current]
        return place_anew(load, computed, owned, replicas=replicas, move_cost=move_cost, time_limit_s=time_limit_s)

    def copy_bytes(self, plan: PlanLike, planned: LocalProgram, copied: LocalProgram) -> int:
        """See `ExpertCompiler`."""
        assert isinstance(plan, Plan)
        return bytes_of_copies(plan, planned, copied)


@dataclass(frozen=True)
class Compiler(PlacesExperts):
    """Makes compiled steps for one rank.

    `plan`: a saved, edited or hand-made plan to follow instead of searching. The first of `ranks` plans for all; what
    fails on one rank alone is raised on every rank.
    """

    mesh: Mesh
    options: Options
    geometry: RankGeometry
    ranks: RankGroup
    plan: Plan | None = None

    def compile_step(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        parameter_layouts: Mapping[str, Layout] | None,
        hosted: frozenset[str] | None,
    ) -> CompiledStep:
        """Capture, plan and emit one program; see `StepCompiler`."""
        program = self.ranks.all_succeed(lambda: self._captured(model, args, kwargs))
        options = replace(self.options, parameter_layouts=parameter_layouts, hosted=hosted)
        text = self.ranks.first_decides(lambda: _pack(plan_or_follow(program, self.mesh, options, self.plan)))
        assignment, plan = _unpack(text)
        local = self.ranks.all_succeed(lambda: emit(program, assignment, self.geometry))
        return CompiledStep(program, assignment, local, plan)

    def _captured(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        return capture(model, args, kwargs, device=self.mesh.device_type, precision=self.options.precision)


def plan_or_follow(program: Program, mesh: Mesh, options: Options, plan: Plan | None) -> Planned:
    """A plan that is searched for, or a given one, priced anew."""
    if plan is None or (options.parameter_layouts is not None and plan.model_hash != program_hash(program)):
        return _noted(plan_program(program, mesh, options), program.notes)

    def pick(planning: PlanningProblem, hosting: Hosting) -> tuple[tuple[int, ...], Residency]:
        return resolve(planning, plan), residency_of(planning.decisions, plan, hosting)

    planned = price_choice(program, mesh, options, pick, plan.search)
    return _noted(planned, (*program.notes, *what_was_recomputed(plan, planned.plan)))


def _noted(planned: Planned, notes: tuple[str, ...]) -> Planned:
    return replace(planned, plan=planned.plan.repriced(notes=notes)) if notes else planned


def _pack(planned: Planned) -> str:
    """What the first rank decides: the strategy of every op, and the plan."""
    message = (planned.assignment, planned.plan.repriced(problem=None, planning=None))
    return base64.b64encode(pickle.dumps(message)).decode()


def _unpack(text: str) -> tuple[Assignment, Plan]:
    """What the first rank of this same program sent: the ranks of one job trust each other, as in torch.distributed."""
    assignment, plan = pickle.loads(base64.b64decode(text))
    if not isinstance(plan, Plan):
        raise PlanError("the first rank sent no plan")
    return assignment, plan


@dataclass(frozen=True)
class StagedCompiler(PlacesExperts):
    """Makes compiled pipelines for one rank, as `Compiler` makes steps."""

    mesh: Mesh
    options: Options
    request: PipelineRequest
    ranks: RankGroup
    plan: Plan | None = None

    def compile_pipeline(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, like: PipelineStep | None
    ) -> CompiledPipeline:
        """Capture, plan and stage one program; see `PipelineCompiler`."""
        request = self.request
        if like is not None and request.accumulated and not torch.is_grad_enabled():  # what is trained is not changed
            most = like.schedule.microbatches
            request = replace(request, microbatches=microbatches_of(args, kwargs, most))

        def captured() -> Program:
            part = part_to_capture(request, args, kwargs, like)
            return capture(model, *part, device=self.mesh.device_type, precision=self.options.precision)

        program = self.ranks.all_succeed(captured)
        text = self.ranks.first_decides(lambda: _packed(self._planned(program, request, like)))
        return self.ranks.all_succeed(lambda: _staged(program, text))

    def _planned(self, program: Program, request: PipelineRequest, like: PipelineStep | None) -> PlannedPipeline:
        return pipeline_or_follow(program, self.mesh, self.options, request, plan=self.plan, like=like)


def part_to_capture(
    request: PipelineRequest, args: tuple[Any, ...], kwargs: dict[str, Any], like: PipelineStep | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The part of a call of which a pipeline's program is made: all of it, but one microbatch where each is a batch."""
    if not request.are_batches or (like is not None and not request.accumulated):
        return args, kwargs
    return first_microbatch(args, kwargs, request.microbatches or request.stages or 1)


def pipeline_or_follow(
    program: Program,
    mesh: Mesh,
    options: Options,
    request: PipelineRequest,
    *,
    plan: Plan | None = None,
    like: PipelineStep | None = None,
) -> PlannedPipeline:
    """A pipeline that is searched for, or a given one, priced anew; `like`: for other shapes or modes of its model."""
    if like is not None:
        return plan_pipeline_like(program, mesh, options, like.staged, like.schedule, like.assignments, request)
    if plan is not None:
        return follow_pipeline(program, mesh, options, plan)
    return plan_pipeline(program, mesh, options, request)


def _packed(planned: PlannedPipeline) -> str:
    """What the first rank decides: microbatches, cuts, schedule, the strategies of each stage, the plan."""
    pieces, staged = planned.staged.microbatches, planned.staged
    assignments = tuple(item.assignment for item in planned.stages)
    plan = planned.plan.without_problems()
    semantics = pieces.count, pieces.independent, pieces.accumulated
    message = (pieces.cut, pieces.layouts, semantics, staged.cuts, planned.schedule, assignments, planned.axis, plan)
    return base64.b64encode(pickle.dumps(message)).decode()


def _staged(program: Program, text: str) -> CompiledPipeline:
    """The pipeline that the first rank sent: the ranks of one job trust each other, as in torch.distributed."""
    cut, layouts, semantics, cuts, schedule, assignments, axis, plan = pickle.loads(base64.b64decode(text))
    count, independent, accumulated = semantics
    if accumulated:
        pieces = accumulated_microbatches(program, count)
    elif independent:
        pieces = independent_microbatches(program, count)
    else:
        pieces = cut_as(program, cut, layouts)
    staged = stage_program(pieces, cuts)
    return CompiledPipeline(PipelineStep(staged, schedule, assignments, axis), plan)


def pipeline_step(planned: PlannedPipeline) -> PipelineStep:
    """What the runtime runs of a plan made in this process."""
    assignments = tuple(item.assignment for item in planned.stages)
    return PipelineStep(planned.staged, planned.schedule, assignments, planned.axis)
