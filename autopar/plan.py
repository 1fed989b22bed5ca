"""The plan: everything decided, with what it is predicted to cost. Frozen data, readable JSON, no graph inside."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autopar.cost_models.simulator import Simulation, StepOps
from autopar.errors import PlanError, PlanFormatError
from autopar.folding import expand_key, fold_keys
from autopar.plan_entries import OpWithoutRule, Pipeline, PlanEntry, layout_texts
from autopar.search import Problem, memory_frontier, undominated
from autopar.sharding.layout import format_layout, parse_layout
from autopar.version import __version__

SCHEMA = 2
RESIDENCIES = ("keep", "recompute")
PIPELINE_NUMBERS = ("axis", "microbatches", "virtual_stages", "bubble")
STAGE_NUMBERS = (
    "number", "rank", "forward_s", "backward_input_s", "backward_weight_s", "in_flight", "activation_bytes",
    "sent_bytes",
)  # fmt: skip
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
    recomputation: Problem | None = field(default=None, repr=False, compare=False)  # under these layouts; not saved

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
        buffers of moves; and recomputation under this plan's layouts, down to the least memory that it leads to.
        Raises PlanError for a plan that was loaded rather than searched.
        """
        found = list(memory_frontier(self._searched()))
        if self.recomputation is not None:
            base = self.cost - self.residency_s
            again = memory_frontier(self.recomputation, points=16, time_limit_s=3.0)
            found += [(bytes_, base + seconds) for bytes_, seconds in again]
        return undominated(found)

    def simulate(self, *, rank_speeds: Sequence[float] = ()) -> Simulation:
        """One step of the emitted program over compute and communication streams: see `Simulation.save_trace`.

        `rank_speeds`: of stragglers, in rank order; 0.5 computes half as fast, ranks not listed at full speed.
        Raises PlanError for a plan that was loaded: give it to make_plan with `plan=`, which emits it.
        """
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
        if self.problem is None:
            raise PlanError("this plan was loaded, not searched: it has no problem", fix="ask a plan of make_plan")
        return self.problem

    def matching(self, pattern: str) -> tuple[PlanEntry, ...]:
        """Entries whose key or module matches a shell-style pattern."""
        return tuple(
            entry
            for entry in self.every_entry
            if fnmatch.fnmatchcase(entry.key, pattern) or (entry.module and fnmatch.fnmatchcase(entry.module, pattern))
        )

    def explain(self, pattern: str) -> str:
        """What was chosen for the parameters, ops or modules that match, and what it costs."""
        from autopar.report.text import explain_entries

        return explain_entries(self, pattern)

    def diff(self, other: Plan) -> str:
        """What `other` decides differently, folded over repeated layers, and what that costs."""
        from autopar.report.text import diff_plans

        return diff_plans(self, other)

    def __str__(self) -> str:
        from autopar.report.text import plan_text

        return plan_text(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON made for people: names, not node numbers; repeated layers in one line."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

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
        self._searched().save(path)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain dicts and lists."""
        folded = fold_keys({entry.key: entry.signature() for entry in self.entries})
        by_key = {entry.key: entry for entry in self.entries}
        sections: dict[str, dict[str, Any]] = {"inputs": {}, "parameters": {}, "ops": {}}
        for text, members in folded.items():
            entry = by_key[members[0]]
            sections[_section(entry.kind)][text] = _entry_json(entry)
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
                "memory": dict(self.memory),
                "memory_limit_bytes": self.memory_limit_bytes,
                "optimizer": self.optimizer,
                "decisions": self.hash,
            },
            **sections,
            **({"pipeline": self._pipeline_json()} if self.pipeline is not None else {}),
            "residency": self._residency_json(),
            "without_rule": [
                {"op": it.op, "uses": it.uses, "rules": list(it.rules), "why": it.why, "where": it.where}
                for it in self.without_rule
            ],
        }

    def _pipeline_json(self) -> dict[str, Any]:
        assert self.pipeline is not None
        stages = [
            {
                **{name: getattr(stage, name) for name in STAGE_NUMBERS},
                "parameters": list(stage.parameters),
                "starts": stage.starts,
                "plan": stage.plan.to_json(),
            }
            for stage in self.stages
        ]
        return {**{name: getattr(self.pipeline, name) for name in ("schedule", *PIPELINE_NUMBERS)}, "stages": stages}

    def _residency_json(self) -> dict[str, str]:
        """What happens to the values of the forward that the backward needs; what is not listed is kept, if needed."""
        said = {entry.key: entry.residency for entry in self.entries if entry.residency}
        return {text: said[members[0]] for text, members in fold_keys(said).items()}

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """A checked plan from plain dicts and lists."""
        return _Reader(data).plan()

    def without_problems(self) -> Plan:
        """Without what was searched and simulated: what other ranks need."""
        stages = tuple(replace(stage, plan=stage.plan.without_problems()) for stage in self.stages)
        return replace(self, problem=None, step_ops=None, recomputation=None, stages=stages)

    def repriced(self, **changes: Any) -> Plan:
        """The same decisions with other numbers."""
        return replace(self, **changes)


def _section(kind: str) -> str:
    return {"op": "ops", "parameter": "parameters"}.get(kind, "inputs")


def _entry_json(entry: PlanEntry) -> Any:
    if entry.kind == "op":
        return f"{' '.join(layout_texts(entry.inputs))} -> {' '.join(layout_texts(entry.outputs))}".strip()
    return format_layout(entry.outputs[0])


class _Reader:
    """Reads plan JSON field by field; the first thing that is wrong is a PlanFormatError that names it."""

    def __init__(self, data: Any) -> None:
        if not isinstance(data, dict) or data.get("format") != "autopar plan":
            raise PlanFormatError('this is not a plan: no "format": "autopar plan"', fix="write one with plan.save")
        schema = data.get("schema")
        if not isinstance(schema, int) or isinstance(schema, bool) or not 1 <= schema <= SCHEMA:
            raise PlanFormatError(
                f"plan schema {schema!r}, this version reads 1 to {SCHEMA}", fix="plan again with this version"
            )
        self.schema, self.data = schema, data

    def field(self, holder: Any, name: str, *kinds: type) -> Any:
        value = holder.get(name)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise PlanFormatError(f"{name!r} is {value!r}, expected {' or '.join(kind.__name__ for kind in kinds)}")
        return value

    def number(self, holder: Any, name: str) -> float:
        value = self.field(holder, name, int, float)
        if not 0 <= value <= sys.float_info.max:
            raise PlanFormatError(f"{name!r} is {value!r}, expected a finite number")
        return float(value)

    def plan(self) -> Plan:
        mesh = self.field(self.data, "mesh", dict)
        shape = self.field(mesh, "shape", list)
        names = self.field(mesh, "axes", list)
        if not shape or not all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in shape):
            raise PlanFormatError(f"mesh shape {shape!r} is not a list of sizes")
        if not all(isinstance(name, str) for name in names):
            raise PlanFormatError(f"mesh axes {names!r} are not names")
        predicted = self.field(self.data, "predicted", dict)
        search = self.field(self.data, "search", dict)
        plan = Plan(
            mesh_shape=tuple(shape),
            axis_names=tuple(names),
            hardware=self.field(mesh, "hardware", str),
            search=self.field(search, "name", str),
            model_hash=self.field(self.data, "model", str),
            entries=self.with_residency(self.entries(len(shape))),
            step_s=self.number(predicted, "step_s"),
            recompute_s=self.number(predicted, "recompute_s") if self.schema > 1 else 0.0,
            peak_bytes=int(self.number(predicted, "peak_bytes")),
            memory=self.memory(predicted),
            memory_limit_bytes=self.field(predicted, "memory_limit_bytes", int, type(None)),
            optimizer=self.field(predicted, "optimizer", str),
            cost=self.number(search, "cost"),
            bound=self.number(search, "bound"),
            version=self.field(self.data, "version", str),
            without_rule=self.without_rule(),
            **self.pipeline(len(shape)),
        )
        if predicted.get("decisions") != plan.hash:
            return plan.repriced(
                notes=("edited since it was priced: its costs are computed again when it is compiled",)
            )
        return plan

    def pipeline(self, axes: int) -> dict[str, Any]:
        """The stages, if there are any."""
        if "pipeline" not in self.data:
            return {}
        found = self.field(self.data, "pipeline", dict)
        numbers = {name: self.number(found, name) for name in PIPELINE_NUMBERS}
        whole = {name: int(numbers[name]) for name in PIPELINE_NUMBERS if name != "bubble"}
        if whole["axis"] >= axes or whole["microbatches"] < 1 or whole["virtual_stages"] < 1:
            raise PlanFormatError(f"a pipeline of {whole} on a mesh of {axes} axes", where="pipeline")
        pipeline = Pipeline(schedule=self.field(found, "schedule", str), bubble=numbers["bubble"], **whole)
        stages = [self.stage(number, item) for number, item in enumerate(self.field(found, "stages", list))]
        if not stages:
            raise PlanFormatError("a pipeline without stages", where="pipeline")
        return {"pipeline": pipeline, "stages": tuple(stages)}

    def stage(self, number: int, item: Any) -> StagePlan:
        if not isinstance(item, dict):
            raise PlanFormatError(f"stage {number} is {item!r}, expected a dict", where="pipeline")
        numbers = {name: self.number(item, name) for name in STAGE_NUMBERS}
        exact: dict[str, Any] = {name: value if name.endswith("_s") else int(value) for name, value in numbers.items()}
        if exact["number"] != number:
            raise PlanFormatError(f"stage {exact['number']} stands at place {number}", where="pipeline")
        names = self.field(item, "parameters", list)
        if not all(isinstance(name, str) for name in names):
            raise PlanFormatError(f"'parameters' is {names!r}, expected a list of names", where=f"stage {number}")
        starts, plan = self.field(item, "starts", str), Plan.from_json(item.get("plan"))
        return StagePlan(starts=starts, plan=plan, parameters=tuple(names), **exact)

    def memory(self, predicted: dict[str, Any]) -> dict[str, int]:
        found = self.field(predicted, "memory", dict)
        return {kind: int(self.number(found, kind)) for kind in found}

    def without_rule(self) -> tuple[OpWithoutRule, ...]:
        """A list that plans of before discovery do not have."""
        if "without_rule" not in self.data:
            return ()
        found = []
        for item in self.field(self.data, "without_rule", list):
            if not isinstance(item, dict):
                raise PlanFormatError(f"'without_rule' holds {item!r}, expected dicts")
            rules = self.field(item, "rules", list)
            if not all(isinstance(rule, str) for rule in rules):
                raise PlanFormatError(f"'rules' is {rules!r}, expected a list of texts")
            texts = [self.field(item, name, str) for name in ("op", "why", "where")]
            found.append(OpWithoutRule(texts[0], int(self.number(item, "uses")), tuple(rules), *texts[1:]))
        return tuple(found)

    def entries(self, axes: int) -> list[PlanEntry]:
        found: dict[str, PlanEntry] = {}
        for section in ("inputs", "parameters", "ops"):
            for text, value in self.field(self.data, section, dict).items():
                for key in expand_key(text):
                    if key in found:
                        raise PlanFormatError(f"{key!r} is decided twice", where=f"{section}: {text}")
                    found[key] = self.entry(section, text, key, value, axes)
        return list(found.values())

    def with_residency(self, entries: list[PlanEntry]) -> tuple[PlanEntry, ...]:
        """The entries with what happens to their values; plans of schema 1 keep everything."""
        said: dict[str, str] = {}
        for text, value in self.field(self.data, "residency", dict).items() if self.schema > 1 else ():
            if value not in RESIDENCIES:
                raise PlanFormatError(
                    f"{value!r} is no residency", where=f"residency: {text}", fix=f"write {' or '.join(RESIDENCIES)}"
                )
            said.update(dict.fromkeys(expand_key(text), value))
        unknown = said.keys() - {entry.key for entry in entries if entry.kind in ("op", "parameter")}
        if unknown:
            raise PlanFormatError(f"{sorted(unknown)[0]!r} is no op or parameter of this plan", where="residency")
        return tuple(replace(entry, residency=said.get(entry.key, "")) for entry in entries)

    def entry(self, section: str, text: str, key: str, value: Any, axes: int) -> PlanEntry:
        try:
            if section == "ops":
                sides = _word(value).split("->")
                if len(sides) != 2:
                    raise PlanFormatError(
                        f"{value!r} has no '->'", fix='write inputs -> outputs, as "S0,R R,S1 -> S0,S1"'
                    )
                layouts = [tuple(parse_layout(word, axes) for word in side.split()) for side in sides]
                return PlanEntry(key, "op", layouts[0], layouts[1])
            return PlanEntry(key, _kind(section, key), (), (parse_layout(_word(value), axes),))
        except PlanFormatError as error:
            raise PlanFormatError(error.what, where=f"{section}: {text}", fix=error.fix) from error


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise PlanFormatError(f"{value!r} is not a layout", fix='write placements by axis, as "S0,R"')
    return value


def _kind(section: str, key: str) -> str:
    return "parameter" if section == "parameters" else key.partition(":")[0]
