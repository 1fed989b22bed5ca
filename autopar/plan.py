"""The plan: everything decided, with what it is predicted to cost. Frozen data, readable JSON, no graph inside."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autopar.cost_models.simulator import Simulation, StepOps
from autopar.errors import PlanError, PlanFormatError
from autopar.folding import fold_in_order, fold_keys, name_matches
from autopar.plan_details import EntryCosts, PlanDetails
from autopar.plan_entries import SCHEMA, WHOLE, OpWithoutRule, Pipeline, PlanEntry, PlanReader, plan_json_text
from autopar.plan_questions import Change, Cutting, Explanation, Planning, check_memory_limit
from autopar.search import Problem, memory_frontier, undominated
from autopar.version import __version__
from autopar.written_files import written_file

__all__ = ["SCHEMA", "OpWithoutRule", "Plan", "PlanEntry", "StagePlan"]
_REWRITE = "give a file that plan.save wrote, or compare with one"


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage. `starts`: the key of the op before which the program is cut ("" for the first stage)."""

    number: int
    rank: int  # along the pipeline's axis
    starts: str
    plan: Plan  # on the mesh without the pipeline's axis, for one microbatch
    parameters: tuple[str, ...] = ()
    forward_s: float = 0.0
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    in_flight: int = 1  # microbatches whose activations are held at once, at most
    activation_bytes: int = 0  # of one microbatch, from its forward to its backward
    sent_bytes: int = 0  # to later stages for one microbatch, by one rank

    def to_json(self) -> dict[str, Any]:
        """The stage as plain dicts and lists."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**plain, "parameters": list(self.parameters), "plan": self.plan.to_json()}


@dataclass(frozen=True)
class Plan:
    """What was chosen, what it costs, and how good it could be at best.

    `step_s`: seconds of one training step on the profile's hardware, as the simulator walks the emitted program.
    `peak_bytes`: the most bytes alive on one rank, everything counted in `memory`. `cost` and `bound`: the search's
    objective and its proven lower bound, seconds.
    """

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    hardware: str
    search: str
    model_hash: str
    entries: tuple[PlanEntry, ...]
    step_s: float = 0.0
    recompute_s: float = 0.0  # part of step_s
    residency_s: float = field(default=0.0, repr=False, compare=False)  # of step_s, what is not the usual residency's
    peak_bytes: int = 0
    host_bytes: int = 0  # the most that one rank holds on the host
    host_memory: Mapping[str, int] = field(default_factory=dict)  # of that, bytes by kind
    memory: Mapping[str, int] = field(default_factory=dict)  # bytes by kind at the peak
    memory_limit_bytes: int | None = None
    optimizer: str = "none"
    cost: float = 0.0
    bound: float = 0.0
    notes: tuple[str, ...] = ()
    without_rule: tuple[OpWithoutRule, ...] = ()
    alternatives: Mapping[str, float] = field(
        default_factory=dict
    )  # predicted seconds of the plans compared, memory aside; simulated where they come close to the best
    version: str = __version__
    stages: tuple[StagePlan, ...] = ()
    pipeline: Pipeline | None = None  # then the decisions are those of the stages' plans
    experts: tuple[Any, ...] = ()
    problem: Problem | None = field(default=None, repr=False, compare=False)  # what was searched; not saved
    step_ops: StepOps | None = field(default=None, repr=False, compare=False)  # the emitted program, timed; not saved
    details: PlanDetails | None = field(default=None, repr=False, compare=False)  # measured of the emitted program
    planning: Planning | None = field(default=None, repr=False, compare=False)  # where it comes from; not saved
    cutting: Cutting | None = field(default=None, repr=False, compare=False)  # of a pipeline, the same of its cuts
    other_meshes: tuple[Plan, ...] = field(default=(), repr=False, compare=False)  # plans of as many devices; not saved

    def __post_init__(self) -> None:
        axes = len(self.mesh_shape)
        if len(self.axis_names) != axes:
            raise PlanFormatError(f"{len(self.axis_names)} axis names for a mesh of {axes} axes")
        for entry in self.entries:
            if any(len(layout) != axes for layout in (*entry.inputs, *entry.outputs)):
                raise PlanFormatError(f"{entry.key}: a layout does not have {axes} placements")

    @property
    def gap(self) -> float:
        """How far, at most, the search's cost is above the best possible one, as a fraction."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost > 0 else 0.0

    @property
    def hash(self) -> str:
        """Of the model, the mesh and every decision; not of the costs."""
        lines = [self.model_hash, repr(self.mesh_shape)]
        if self.pipeline is not None:
            lines.append(f"{self.pipeline.schedule} {self.pipeline.axis} {self.pipeline.microbatches}")
            lines += [self.pipeline.batch_semantics] if self.pipeline.batch_semantics != WHOLE else []
            lines += [f"{stage.number} {stage.starts} {stage.plan.hash}" for stage in self.stages]
        lines += sorted(f"{entry.key} {' '.join(entry.signature())}" for entry in self.entries)
        return hashlib.sha256("\n".join(lines).encode(errors="backslashreplace")).hexdigest()[:16]

    @property
    def every_entry(self) -> tuple[PlanEntry, ...]:
        """The decisions, of all stages if there are any."""
        return (*self.entries, *(entry for stage in self.stages for entry in stage.plan.entries))

    @property
    def discovered(self) -> tuple[OpWithoutRule, ...]:
        """The ops whose rules were found by running them on shards."""
        return tuple(op for op in self.without_rule if op.rules)

    @property
    def replicated(self) -> tuple[OpWithoutRule, ...]:
        """The ops that run in full on every rank, for want of a rule."""
        return tuple(op for op in self.without_rule if not op.rules)

    @property
    def communication_s(self) -> float:
        """Seconds of the moves between layouts."""
        return sum(move.seconds for entry in self.every_entry for move in entry.moves)

    @cached_property
    def frontier(self) -> tuple[tuple[int, float], ...]:
        """(live bytes, seconds) of the best plans under ever tighter limits: what each gigabyte costs in time.

        Solved when first asked for: layouts without recomputation, from the search problem, whose bytes leave out the
        buffers of moves; and recomputation under this plan's layouts, down to the least memory that it leads to. Of
        `autopar.Devices`, the best plans on any of the meshes.
        Raises PlanError for a plan that was loaded rather than searched.
        """
        found = list(memory_frontier(self._searched()))
        if self.planning is not None:
            base = self.cost - self.residency_s
            again = memory_frontier(self.planning.recomputation, points=16, time_limit_s=3.0)
            found += [(bytes_, base + seconds) for bytes_, seconds in again]
        found += [point for plan in self.other_meshes for point in plan.frontier]
        return undominated(found)

    def simulate(self, *, rank_speeds: Sequence[float] = ()) -> Simulation:
        """One step of the emitted program over compute and communication streams: see `Simulation.save_trace`.

        `rank_speeds`: of stragglers, in rank order; 0.5 computes half as fast, ranks not listed at full speed.
        Raises PlanError for a plan that was loaded: give it to make_plan with `plan=`, which emits it.
        """
        self._refuse_stages("the simulation of a step")
        if self.step_ops is None:
            raise PlanError("this plan was loaded, not emitted", fix="give it to make_plan or compile with plan=")
        return self.step_ops.simulate(rank_speeds)

    def frontier_table(self) -> str:
        """The frontier as text: what each byte less costs."""
        from autopar.report.frontier import frontier_table

        return frontier_table(self.frontier)

    def save_frontier(self, path: str | os.PathLike[str]) -> None:
        """Write the frontier as a picture, PNG or SVG by the name of the file; needs matplotlib."""
        from autopar.report.frontier import save_frontier

        save_frontier(self.frontier, path)

    def _searched(self) -> Problem:
        self._refuse_stages("the search problem")
        if self.problem is None:
            raise PlanError("this plan was loaded, not searched: it has no problem", fix="ask a plan of make_plan")
        return self.problem

    def matching(self, pattern: str) -> tuple[PlanEntry, ...]:
        """Entries whose key or module matches, as `name_matches` has it; a module's name means all in it."""
        inside = (f"{pattern}.", f"{pattern}/")
        return tuple(
            entry
            for entry in self.every_entry
            if any(
                name_matches(name, pattern) or (pattern and name.startswith(inside))
                for name in (entry.key, entry.module)
                if name
            )
        )

    def explain(self, pattern: str) -> str:
        """What was chosen for the parameters, ops or modules that match, at what price, and why nothing else was.

        Alternatives are priced for everything: the rest is chosen anew for each. They, and the formulas behind the
        prices, need the model: a plan that was loaded is given it by `make_plan(model, mesh, plan=...)`.
        Of a pipeline, `stage 1` asks why it begins where it does, `schedule` why it runs as it does.
        """
        from autopar.report.explain import explanations_text, stages_text

        return explanations_text(self, pattern, self.explanations(pattern), stages_text(self, pattern))

    def explanations(self, pattern: str) -> tuple[Explanation, ...]:
        """What `explain` tells, as values; repeated layers that decide alike are one; of a pipeline, stage by stage."""
        if self.pipeline is not None:
            return tuple(
                replace(item, stage=stage.number) for stage in self.stages for item in stage.plan.explanations(pattern)
            )
        matched = self.matching(pattern)
        folded = fold_keys({entry.key: (entry.signature(), entry.costs.prices) for entry in matched})
        if self.planning is not None:
            return self.planning.explanations(self, pattern, folded)
        by_key = {entry.key: entry for entry in matched}
        missing = (
            "alternatives and formulas: they need the model; name it with --model in a shell, or explain what "
            "make_plan(model, mesh, plan=...) gives"
        )
        return tuple(
            Explanation(name, by_key[members[0]], len(members), missing=missing) for name, members in folded.items()
        )

    def what_if(
        self,
        *,
        pin: Mapping[str, str] | Sequence[Any] = (),
        memory_limit_bytes: int | None = None,
        hardware: Any = None,
        mesh: Any = None,
        batch: int | None = None,
    ) -> Plan:
        """The plan under other circumstances, solved again from this one; what is not named stays as it was.

        `pin`: as `constraints` of make_plan, checked against the rules. `batch`: the size of dim 0 of the inputs.
        Raises what make_plan raises, and PlanError for a plan that was loaded.
        """
        check_memory_limit(memory_limit_bytes)
        return self._asked("what_if").what_if(self, Change(pin, memory_limit_bytes, hardware, mesh, batch))

    def emitted(self) -> Plan:
        """This plan with the time and the memory of its emitted program, where `what_if` only foresaw them."""
        return self if self.step_ops is not None else self._asked("emitted").emitted(self)

    def _asked(self, question: str) -> Planning:
        self._refuse_stages(question)
        if self.planning is None:
            raise PlanError(
                f"{question} needs the model, and this plan was loaded or received without it",
                fix="ask the plan that make_plan(model, mesh, example_inputs=..., plan=...) gives",
            )
        return self.planning

    def _refuse_stages(self, question: str) -> None:
        if self.pipeline is not None:
            raise PlanError(
                f"{question} is of one program, and this plan has stages",
                fix="ask the plan of a stage, plan.stages[0].plan, or make_plan with other arguments",
            )

    def plot(self, kind: str, path: str | os.PathLike[str] | None = None) -> Any:
        """A picture of `memory` over time, the `frontier`, the `communication` or the `step`; of a pipeline, of its
        `schedule`; needs matplotlib.

        Written as PNG or SVG by the name of the file; without one, the `matplotlib.figure.Figure` is returned.
        """
        from autopar.report.pictures import plot_plan

        return plot_plan(self, kind, path)

    def diff(self, other: Plan) -> str:
        """What `other` decides differently, folded over repeated layers, and what that costs."""
        from autopar.report.difference import diff_plans

        if not isinstance(other, Plan):
            raise PlanError(f"a plan was compared with a {type(other).__name__}", fix="give another Plan")
        return diff_plans(self, other)

    def __str__(self) -> str:
        from autopar.report.text import plan_text

        return plan_text(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON made for people: names, not node numbers; repeated layers in one line; what is measured last.
        Raises FileWriteError."""
        with written_file(path) as file:
            file.write_text(plan_json_text(self.to_json()), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read what `save` wrote, or a person edited. Raises PlanFormatError; nothing in the file is executed."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:  # of Python, the decoder, or JSON
            raise PlanFormatError(f"not a readable JSON file: {error}", where=str(path), fix=_REWRITE) from error
        try:
            return cls.from_json(data)
        except PlanFormatError as error:
            where = f"{path}: {error.where}".rstrip(": ")
            raise PlanFormatError(error.what, where=where, fix=error.fix or _REWRITE) from error

    def export_problem(self, path: str | os.PathLike[str]) -> None:
        """Write the search problem that this plan answers, in the contest's JSON (`.gz` compresses)."""
        problem = self._searched()
        with written_file(path):
            problem.save(path)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain dicts and lists."""
        modules = {entry.key: (entry.kind, entry.module) for entry in self.entries}
        folded = fold_in_order({entry.key: entry.signature() for entry in self.entries}, modules)
        by_key = {entry.key: entry for entry in self.entries}
        sections: dict[str, dict[str, Any]] = {"inputs": {}, "parameters": {}, "ops": {}}
        for text, members in folded.items():
            entry = by_key[members[0]]
            sections[_section(entry.kind)][text] = entry.words
        return {
            "format": "autopar plan",
            "schema": SCHEMA,
            "version": self.version,
            "model": self.model_hash,
            "mesh": {"shape": list(self.mesh_shape), "axes": list(self.axis_names), "hardware": self.hardware},
            "search": {"name": self.search, "cost": self.cost, "bound": self.bound},
            "predicted": {
                "step_s": self.step_s,
                "recompute_s": self.recompute_s,
                "peak_bytes": self.peak_bytes,
                "host_bytes": self.host_bytes,
                "host_memory": dict(self.host_memory),
                "memory": dict(self.memory),
                "memory_limit_bytes": self.memory_limit_bytes,
                "optimizer": self.optimizer,
                "alternatives": dict(self.alternatives),
                "decisions": self.hash,
            },
            **sections,
            **({"pipeline": self._pipeline_json()} if self.pipeline is not None else {}),
            "residency": self._residency_json(),
            "without_rule": [
                {"op": it.op, "uses": it.uses, "rules": list(it.rules), "why": it.why, "where": it.where}
                for it in self.without_rule
            ],
            "costs": self._costs_json(),
            "frontier": [list(point) for point in self.frontier] if "frontier" in self.__dict__ else None,
            "details": None if self.details is None else self.details.to_json(),
        }

    def _pipeline_json(self) -> dict[str, Any]:
        assert self.pipeline is not None
        return {**asdict(self.pipeline), "stages": [stage.to_json() for stage in self.stages]}

    def _residency_json(self) -> dict[str, str]:
        """What happens to the values of the forward that the backward needs; what is not listed is kept, if needed."""
        said = {entry.key: entry.residency for entry in self.entries if entry.residency}
        return {text: said[members[0]] for text, members in fold_keys(said).items()}

    def _costs_json(self) -> dict[str, Any]:
        """What each decision was priced at, to be read; a plan that is followed is priced anew."""
        costs = {entry.key: entry.costs for entry in self.entries if entry.costs.prices != (0.0, 0, ())}
        return {text: costs[members[0]].to_json() for text, members in fold_keys(costs).items()}

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """A checked plan from plain dicts and lists; costs that are not those of its decisions are left out."""
        return _plan_of(PlanReader(data))

    def without_problems(self) -> Plan:
        """Without what was searched and simulated: what other ranks need."""
        stages = tuple(replace(stage, plan=stage.plan.without_problems()) for stage in self.stages)
        return replace(self, problem=None, step_ops=None, planning=None, cutting=None, other_meshes=(), stages=stages)

    def repriced(self, **changes: Any) -> Plan:
        """The same decisions with other numbers."""
        return replace(self, **changes)


def _section(kind: str) -> str:
    return {"op": "ops", "parameter": "parameters"}.get(kind, "inputs")


def _plan_of(reader: PlanReader) -> Plan:
    mesh, axes = reader.mesh()
    predicted = reader.field(reader.data, "predicted", dict)
    search = reader.field(reader.data, "search", dict)
    plan = Plan(
        mesh_shape=mesh,
        axis_names=axes,
        hardware=reader.hardware(),
        search=reader.field(search, "name", str),
        model_hash=reader.field(reader.data, "model", str),
        entries=reader.with_costs(reader.with_residency(reader.entries(len(mesh))), len(mesh)),
        step_s=reader.number(predicted, "step_s"),
        recompute_s=reader.number(predicted, "recompute_s"),
        peak_bytes=int(reader.number(predicted, "peak_bytes")),
        host_bytes=int(reader.number(predicted, "host_bytes")),
        host_memory=reader.memory(predicted, "host_memory"),
        memory=reader.memory(predicted, "memory"),
        memory_limit_bytes=reader.field(predicted, "memory_limit_bytes", int, type(None)),
        optimizer=reader.field(predicted, "optimizer", str),
        cost=reader.number(search, "cost"),
        bound=reader.number(search, "bound"),
        version=reader.field(reader.data, "version", str),
        without_rule=reader.without_rule(),
        alternatives=reader.alternatives(predicted),
        details=reader.details(),
        pipeline=reader.pipeline(len(mesh)),
        stages=tuple(
            StagePlan(plan=Plan.from_json(plan), **numbers)  # a plan of any schema
            for numbers, plan in reader.stages()
        ),
    )
    frontier = reader.frontier()
    if predicted.get("decisions") != plan.hash:
        return _unpriced(plan)
    if frontier is not None:
        plan.__dict__["frontier"] = frontier
    return plan


def _unpriced(plan: Plan) -> Plan:
    """An edited plan: none of the numbers in its file are those of its decisions."""
    stages = (
        StagePlan(item.number, item.rank, item.starts, _unpriced(item.plan), item.parameters) for item in plan.stages
    )
    return plan.repriced(
        entries=tuple(entry.priced(EntryCosts()) for entry in plan.entries),
        stages=tuple(stages), pipeline=plan.pipeline and replace(plan.pipeline, bubble=0.0),
        step_s=0.0, recompute_s=0.0, peak_bytes=0, host_bytes=0, host_memory={}, memory={}, cost=0.0, bound=0.0,
        alternatives={}, details=None,
        notes=("edited since it was priced: its costs are computed again when it is compiled",),
    )  # fmt: skip
