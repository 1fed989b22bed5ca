"""A plan with a pipeline: microbatches, cuts, a plan for each stage, a schedule."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.capture.program import InputKind, OutputKind, Program
from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.hardware import AxisLinks, axis_links
from autopar.errors import ConstraintError, MeshError, MicrobatchError, PlanError
from autopar.mesh import Mesh
from autopar.plan import Pipeline, Plan, StagePlan
from autopar.planner.constraints import Constraint
from autopar.planner.cuts import balanced_cuts, cuts_like, places
from autopar.planner.decisions import result_key
from autopar.planner.make import Options, Planned, plan_program, program_hash
from autopar.planner.prices import Prices
from autopar.planner.stage_plans import StageCosts, sent_bytes, stage_costs
from autopar.schedules.actions import Schedule
from autopar.schedules.generate import Request, generate
from autopar.schedules.memory import StageMemory
from autopar.schedules.timing import bubble_fraction, simulate_schedule
from autopar.sharding.assignment import Assignment
from autopar.sharding.discovery.book import RuleBook
from autopar.sharding.layout import Layout
from autopar.stages.assign import anatomy
from autopar.stages.microbatch import batch_size, cut_microbatches
from autopar.stages.stage_programs import StageProgram
from autopar.stages.staged import Staged, stage_program

V_SHAPED = ("zb-v",)
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


@dataclass(frozen=True)
class PlannedPipeline:
    """A plan with stages, and all that running it needs."""

    plan: Plan
    staged: Staged
    schedule: Schedule
    stages: tuple[Planned, ...]
    rules: RuleBook  # of the whole program
    axis: int


def plan_pipeline(program: Program, mesh: Mesh, options: Options, request: PipelineRequest) -> PlannedPipeline:
    """Plan a program as a pipeline along one axis of the mesh."""
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
    staged = _staged(program, inner, stages, request, rules)
    planned = plan_stages(staged, inner, options)
    return finished(mesh, axis, staged, planned, rules, options, request)


def _staged(program: Program, mesh: Mesh, stages: int, request: PipelineRequest, rules: RuleBook) -> Staged:
    """With the microbatches asked for, or as many as two per stage where the program can be cut so."""
    if request.microbatches is not None:
        return cut_evenly(program, mesh, stages, request.microbatches, rules)
    size = batch_size(program)
    wanted = [count for count in range(min(size, 2 * stages), 1, -1) if size % count == 0]
    for count in wanted:
        try:
            return cut_evenly(program, mesh, stages, count, rules)
        except MicrobatchError:
            break
    return cut_evenly(program, mesh, stages, 1, rules)


def finished(
    mesh: Mesh,
    axis: int,
    staged: Staged,
    planned: tuple[Planned, ...],
    rules: RuleBook,
    options: Options,
    request: PipelineRequest,
) -> PlannedPipeline:
    """The stages' plans with their schedule, as one plan."""
    inner, ranks = without_axis(mesh, axis), mesh.shape[axis]
    link = axis_links(mesh.profile, mesh.shape)[axis]
    costs = [stage_costs(item, inner, send_seconds(link, sent_bytes(item.local))) for item in planned]
    schedule = make_schedule(staged, ranks, costs, options.limit(mesh), request)
    simulation = simulate_schedule(schedule, dict(enumerate(item.times for item in costs)))
    in_flight = [_in_flight(schedule, stage) for stage in range(len(planned))]
    peak = max(
        sum(costs[stage].peak_bytes(in_flight[stage]) for stage in schedule.stages_of(rank)) for rank in range(ranks)
    )
    limit = options.limit(mesh)
    starts = [found.meta["key"] for found in _starts(staged)]
    plan = Plan(
        mesh_shape=mesh.shape,
        axis_names=mesh.axis_names,
        hardware=mesh.profile.name,
        search=planned[0].plan.search,
        model_hash=program_hash(staged.program),
        entries=(),
        step_s=simulation.step_s + max(_update_s(item) for item in planned),
        peak_bytes=peak,
        memory_limit_bytes=limit,
        optimizer=options.optimizer.name,
        cost=sum(item.plan.cost for item in planned),
        bound=sum(item.plan.bound for item in planned),
        without_rule=tuple(dict.fromkeys(op for item in planned for op in item.plan.without_rule)),
        stages=tuple(
            StagePlan(
                number=stage,
                rank=schedule.rank_of(stage),
                starts="" if stage == 0 else starts[stage - 1],
                plan=item.plan,
                forward_s=costs[stage].times.forward_s,
                backward_input_s=costs[stage].times.backward_input_s,
                backward_weight_s=costs[stage].times.backward_weight_s,
                in_flight=in_flight[stage],
                activation_bytes=costs[stage].saved_bytes,
                sent_bytes=costs[stage].sent_bytes,
            )
            for stage, item in enumerate(planned)
        ),
        pipeline=Pipeline(
            axis, schedule.name, schedule.microbatches, schedule.virtual_stages, bubble_fraction(simulation)
        ),
    )
    return PlannedPipeline(plan, staged, schedule, planned, rules, axis)


def _starts(staged: Staged) -> list[fx.Node]:
    forward = anatomy(staged.microbatches.pieces[0]).forward
    return [forward[cut] for cut in staged.cuts]


def _update_s(planned: Planned) -> float:
    step = planned.plan.step_ops
    return sum(op.seconds for op in step.ops if op.name.startswith("update ")) if step is not None else 0.0


def _in_flight(schedule: Schedule, stage: int) -> int:
    """The most microbatches whose activations a stage holds at once."""
    held = most = 0
    for action in schedule.ranks[schedule.rank_of(stage)]:
        if action.stage == stage and action.kind == "forward":
            held += 1
            most = max(most, held)
        elif action.stage == stage and action.kind in ("backward", "backward_weight"):
            held -= 1
    return most


def send_seconds(link: AxisLinks, bytes_: int) -> float:
    """Seconds to send that many bytes to the next stage."""
    return float(collective_seconds("send", bytes_, link)) if bytes_ else 0.0


def make_schedule(
    staged: Staged, ranks: int, costs: Sequence[StageCosts], limit_bytes: int, request: PipelineRequest
) -> Schedule:
    """The schedule asked for, or for training 1F1B; forward alone where nothing is trained."""
    stages, count = len(staged.stages), staged.microbatches.count
    name = request.schedule or ("1f1b" if stages == ranks else "interleaved")
    memory = {
        stage: StageMemory(
            fixed_bytes=cost.held_bytes + cost.working_bytes, activation_bytes=cost.saved_bytes, version_bytes=0
        )
        for stage, cost in enumerate(costs)
    }
    asked = Request(
        stages,
        count,
        stages // ranks,
        times=dict(enumerate(item.times for item in costs)),
        memory=memory,
        limits_bytes=[float(limit_bytes)] * ranks if name == "auto" else (),
        edges=staged.first.edges,
    )
    return generate(name, asked)


def plan_pipeline_like(
    program: Program,
    mesh: Mesh,
    options: Options,
    like: Staged,
    schedule: Schedule,
    assignments: Sequence[Assignment],
) -> PlannedPipeline:
    """A pipeline for other shapes or modes of a model whose parameters lie already: same stages, same layouts."""
    axis = pipeline_axis(mesh, len(like.stages))
    assert axis is not None
    rules, inner = options.rule_book(mesh), without_axis(mesh, axis)
    layouts: dict[str, Layout] = {}
    for stage, assignment in zip(like.stages, assignments, strict=True):
        for item in stage.program.inputs:
            if item.kind is InputKind.PARAMETER:
                layouts[item.name] = assignment.inputs[item.node]
    count = min(schedule.microbatches, max(1, batch_size(program)))
    pieces = cut_microbatches(program, count, rules.rules_of)
    staged = stage_program(pieces, cuts_like(anatomy(pieces.pieces[0]), like))
    planned = plan_stages(staged, inner, replace(options, parameter_layouts=layouts, constraints=()))
    name = schedule.name if schedule.synchronous else "1f1b"
    return finished(mesh, axis, staged, planned, rules, options, PipelineRequest(len(like.stages), name, count))


def follow_pipeline(program: Program, mesh: Mesh, options: Options, plan: Plan) -> PlannedPipeline:
    """A given plan with stages, checked against the program and priced anew."""
    raise PlanError("plans with stages cannot be followed yet", fix="plan again")
