"""The compiler behind a parallel module: capture, plan, emit; the first rank plans, the others take its plan."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
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
from autopar.planner.make import Options, plan_program, price_choice, program_hash
from autopar.planner.prices import Prices
from autopar.planner.residency import Residency
from autopar.planner.resolve import residency_of, resolve
from autopar.runtime.checks import RankGroup
from autopar.runtime.step import CompiledStep
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout import Layout


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
        program = self.ranks.all_succeed(lambda: capture(model, args, kwargs, device=self.mesh.device_type))
        options = replace(self.options, parameter_layouts=parameter_layouts)
        text = self.ranks.first_decides(lambda: _pack(*plan_or_follow(program, self.mesh, options, self.plan)))
        choice, plan = _unpack(text)
        assignment, local = self.ranks.all_succeed(lambda: self._emit(program, choice, plan))
        return CompiledStep(program, assignment, local, plan)

    def _emit(self, program: Program, choice: tuple[int, ...], plan: Plan) -> tuple[Assignment, LocalProgram]:
        decisions = DecisionList(program, Prices(self.mesh), self.options.optimizer).build()
        assignment = assignment_of(program, decisions, choice, self.mesh.shape, residency_of(decisions, plan))
        return assignment, emit(program, assignment, self.geometry)


def plan_or_follow(
    program: Program, mesh: Mesh, options: Options, plan: Plan | None
) -> tuple[tuple[int, ...], Plan, Assignment]:
    """(choice, plan, assignment): searched for, or those of a given plan, priced anew."""
    if plan is None or (options.parameter_layouts is not None and plan.model_hash != program_hash(program)):
        planned = plan_program(program, mesh, options)
    else:
        given = plan

        def pick(planning: PlanningProblem) -> tuple[tuple[int, ...], Residency]:
            return resolve(planning, given), residency_of(planning.decisions, given)

        planned = price_choice(program, mesh, options, pick, given.search)
    return planned.choice, planned.plan, planned.assignment


def _pack(choice: tuple[int, ...], plan: Plan, _: Assignment) -> str:
    return base64.b64encode(pickle.dumps((choice, plan.repriced(problem=None, recomputation=None)))).decode()


def _unpack(text: str) -> tuple[tuple[int, ...], Plan]:
    """What the first rank of this same program sent: the ranks of one job trust each other, as in torch.distributed."""
    choice, plan = pickle.loads(base64.b64decode(text))
    if not isinstance(plan, Plan):
        raise PlanError("the first rank sent no plan")
    return choice, plan
