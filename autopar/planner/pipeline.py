"""A plan with a pipeline: microbatches, cuts, a plan for each stage, a schedule."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.capture.program import InputKind, OutputKind, Program
from autopar.errors import ConstraintError, MeshError
from autopar.mesh import Mesh
from autopar.planner.constraints import Constraint
from autopar.planner.cuts import balanced_cuts, places
from autopar.planner.decisions import result_key
from autopar.planner.make import Options, Planned, plan_program
from autopar.planner.prices import Prices
from autopar.sharding.discovery.book import RuleBook
from autopar.sharding.layout import Layout
from autopar.stages.assign import anatomy
from autopar.stages.microbatch import cut_microbatches
from autopar.stages.stage_programs import StageProgram
from autopar.stages.staged import Staged, stage_program

PIPELINE_AXES = ("pp", "pipe", "pipeline", "stage")


@dataclass(frozen=True)
class PipelineRequest:
    """What the caller asked for; None is the planner's to choose."""

    stages: int | None = None
    schedule: str | None = None
    microbatches: int | None = None

    @property
    def text(self) -> str:
        """One line per option: what ranks compare."""
        return f"stages {self.stages}\nschedule {self.schedule}\nmicrobatches {self.microbatches}"


def pipeline_axis(mesh: Mesh, stages: int | None) -> int | None:
    """The mesh axis of the pipeline: one named for it, else the first as long as there are stages; None for neither."""
    named = [axis for axis, name in enumerate(mesh.axis_names) if name in PIPELINE_AXES]
    if named:
        return named[0] if mesh.shape[named[0]] > 1 or stages not in (None, 1) else None
    if stages is None or stages == 1:
        return None
    fitting = [axis for axis, size in enumerate(mesh.shape) if size == stages]
    if not fitting:
        raise MeshError(
            f"no axis of the mesh {mesh.shape} has {stages} ranks for {stages} stages",
            fix=f'name an axis "pp" of which {stages} is a multiple, or use an axis of {stages} ranks',
        )
    return fitting[0]


def without_axis(mesh: Mesh, axis: int) -> Mesh:
    """The mesh of one stage: all axes but the pipeline's; one axis of one rank if there is no other."""
    shape = mesh.shape[:axis] + mesh.shape[axis + 1 :]
    names = mesh.axis_names[:axis] + mesh.axis_names[axis + 1 :]
    return Mesh(shape or (1,), names or ("one",), hardware=mesh.profile, device_type=mesh.device_type)


def cut_evenly(program: Program, mesh: Mesh, stages: int, microbatches: int, rules: RuleBook) -> Staged:
    """Microbatches, and stages of equal time by the planner's prices."""
    pieces = cut_microbatches(program, microbatches, rules.rules_of)
    found = anatomy(pieces.pieces[0])
    cuts = balanced_cuts(places(found, Prices(mesh)), stages, [1.0] * stages) if stages > 1 else ()
    return stage_program(pieces, cuts)


def plan_stages(staged: Staged, mesh: Mesh, options: Options) -> tuple[Planned, ...]:
    """A plan for each stage on its own mesh; what goes between two of them lies the same on both sides."""
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
            replace(options, constraints=own, parameter_layouts=fixed or None, boundary_layouts=known),
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


def _parameter_layouts(
    program: Program, planned: Planned, shared: Mapping[str, tuple[int, ...]]
) -> dict[str, Layout]:
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
