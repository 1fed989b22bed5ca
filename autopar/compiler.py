"""The compiler behind a parallel module: capture, plan, emit; the first rank plans, the others take its plan."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autopar.capture.program import Program
from autopar.capture.trace import capture
from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.passes.local_call import RankGeometry
from autopar.passes.pipeline import LocalProgram, emit
from autopar.plan import Plan
from autopar.planner.build import PlanningProblem, assignment_of
from autopar.planner.decisions import DecisionList
from autopar.planner.expert_places import place_anew
from autopar.planner.make import Options, Planned, plan_program, price_choice, program_hash
from autopar.planner.pipeline import plan_pipeline
from autopar.planner.pipeline_again import follow_pipeline, plan_pipeline_like
from autopar.planner.pipeline_plan import PlannedPipeline
from autopar.planner.pipeline_request import PipelineRequest
from autopar.planner.prices import Prices
from autopar.planner.residency import Residency
from autopar.planner.resolve import residency_of, resolve, what_was_recomputed
from autopar.runtime.checks import RankGroup
from autopar.runtime.experts.rebalance import Groups
from autopar.runtime.inputs import first_microbatch
from autopar.runtime.pipeline.module import CompiledPipeline
from autopar.runtime.pipeline.step import PipelineStep
from autopar.runtime.step import CompiledStep
from autopar.sharding.assignment import Assignment, is_getitem
from autopar.sharding.discovery.book import Known, RuleBook
from autopar.sharding.discovery.finder import Finding
from autopar.sharding.layout import Layout
from autopar.sharding.op_call import OpCall, call_of
from autopar.stages.microbatch import cut_as, independent_microbatches
from autopar.stages.staged import stage_program


@dataclass(frozen=True)
class Compiler:
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
    ) -> CompiledStep:
        """Capture, plan and emit one program; see `StepCompiler`."""
        program = self.ranks.all_succeed(lambda: self._captured(model, args, kwargs))
        options = replace(self.options, parameter_layouts=parameter_layouts)
        text = self.ranks.first_decides(lambda: _pack(program, plan_or_follow(program, self.mesh, options, self.plan)))
        choice, plan, findings = _unpack(text)
        rules = RuleBook(Known(_by_call(program, findings)))
        assignment, local = self.ranks.all_succeed(lambda: self._emit(program, choice, plan, rules))
        return CompiledStep(program, assignment, local, plan)

    def place_experts(
        self, load: Sequence[Sequence[float]], current: Sequence[Groups], *, move_cost: float, time_limit_s: float
    ) -> Sequence[Groups]:
        """See `StepCompiler`."""
        return place_anew(load, current, move_cost=move_cost, time_limit_s=time_limit_s)

    def _captured(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        return capture(model, args, kwargs, device=self.mesh.device_type, precision=self.options.precision)

    def _emit(
        self, program: Program, choice: tuple[int, ...], plan: Plan, rules: RuleBook
    ) -> tuple[Assignment, LocalProgram]:
        decisions = DecisionList(program, Prices(self.mesh), self.options.optimizer, rules).build()
        assignment = assignment_of(program, decisions, choice, self.mesh.shape, residency_of(decisions, plan))
        return assignment, emit(program, assignment, self.geometry)


def plan_or_follow(program: Program, mesh: Mesh, options: Options, plan: Plan | None) -> Planned:
    """A plan that is searched for, or a given one, priced anew."""
    if plan is None or (options.parameter_layouts is not None and plan.model_hash != program_hash(program)):
        return plan_program(program, mesh, options)

    def pick(planning: PlanningProblem) -> tuple[tuple[int, ...], Residency]:
        return resolve(planning, plan), residency_of(planning.decisions, plan)

    planned = price_choice(program, mesh, options, pick, plan.search)
    notes = what_was_recomputed(plan, planned.plan)
    return replace(planned, plan=planned.plan.repriced(notes=notes)) if notes else planned


Findings = dict[str, Finding]  # by the key of a node


def _pack(program: Program, planned: Planned) -> str:
    """The choice, the plan, and what was discovered: the strategies among which the choice picks depend on it."""
    known = planned.rules.findings
    findings = {key: known[call] for key, call in _calls(program) if call in known} if known else {}
    message = (planned.choice, planned.plan.repriced(problem=None, recomputation=None, planning=None), findings)
    return base64.b64encode(pickle.dumps(message)).decode()


def _unpack(text: str) -> tuple[tuple[int, ...], Plan, Findings]:
    """What the first rank of this same program sent: the ranks of one job trust each other, as in torch.distributed."""
    choice, plan, findings = pickle.loads(base64.b64decode(text))
    if not isinstance(plan, Plan):
        raise PlanError("the first rank sent no plan")
    return choice, plan, findings


def _by_call(program: Program, findings: Findings) -> list[tuple[OpCall, Finding]]:
    return [(call, findings[key]) for key, call in _calls(program) if key in findings] if findings else []


def _calls(program: Program) -> Iterator[tuple[str, OpCall]]:
    """The key and the call of every op."""
    for node in program.graph_module.graph.nodes:
        if node.op == "call_function" and not is_getitem(node):
            yield node.meta["key"], call_of(node)


@dataclass(frozen=True)
class StagedCompiler:
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

        def captured() -> Program:
            part = part_to_capture(request, args, kwargs, like)
            return capture(model, *part, device=self.mesh.device_type, precision=self.options.precision)

        program = self.ranks.all_succeed(captured)
        text = self.ranks.first_decides(lambda: _packed(self._planned(program, like)))
        return self.ranks.all_succeed(lambda: _staged(program, text))

    def _planned(self, program: Program, like: PipelineStep | None) -> PlannedPipeline:
        return pipeline_or_follow(program, self.mesh, self.options, self.request, plan=self.plan, like=like)


def part_to_capture(
    request: PipelineRequest, args: tuple[Any, ...], kwargs: dict[str, Any], like: PipelineStep | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The part of a call of which a pipeline's program is made: all of it, but one microbatch where each is a batch."""
    if not request.is_asynchronous or like is not None:
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
        return plan_pipeline_like(program, mesh, options, like.staged, like.schedule, like.assignments)
    if plan is not None:
        return follow_pipeline(program, mesh, options, plan)
    return plan_pipeline(program, mesh, options, request)


def _packed(planned: PlannedPipeline) -> str:
    """What the first rank decides: microbatches, cuts, schedule, the strategies of each stage, the plan."""
    pieces, staged = planned.staged.microbatches, planned.staged
    assignments = tuple(item.assignment for item in planned.stages)
    plan = planned.plan.without_problems()
    message = (pieces.cut, pieces.layouts, staged.cuts, planned.schedule, assignments, planned.axis, plan)
    return base64.b64encode(pickle.dumps(message)).decode()


def _staged(program: Program, text: str) -> CompiledPipeline:
    """The pipeline that the first rank sent: the ranks of one job trust each other, as in torch.distributed."""
    cut, layouts, cuts, schedule, assignments, axis, plan = pickle.loads(base64.b64decode(text))
    if schedule.synchronous:
        pieces = cut_as(program, cut, layouts)
    else:
        pieces = independent_microbatches(program, schedule.microbatches)
    staged = stage_program(pieces, cuts)
    return CompiledPipeline(PipelineStep(staged, schedule, assignments, axis), plan)


def pipeline_step(planned: PlannedPipeline) -> PipelineStep:
    """What the runtime runs of a plan made in this process."""
    assignments = tuple(item.assignment for item in planned.stages)
    return PipelineStep(planned.staged, planned.schedule, assignments, planned.axis)
