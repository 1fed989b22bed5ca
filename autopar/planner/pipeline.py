"""A plan with a pipeline: microbatches, cuts, a plan for each stage, a schedule."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import fx

from autopar.capture.program import BETWEEN_STAGES, InputKind, OutputKind, Program
from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.hardware import AxisLinks, axis_links
from autopar.errors import ConstraintError, InputError, MemoryLimitError, MeshError, MicrobatchError, PlanError
from autopar.mesh import Mesh
from autopar.plan import Plan, StagePlan
from autopar.plan_entries import Pipeline
from autopar.planner.build import PlanningProblem
from autopar.planner.constraints import Constraint
from autopar.planner.cuts import balanced_cuts, cuts_like, places
from autopar.planner.decisions import result_key
from autopar.planner.make import Options, Planned, plan_program, price_choice, program_hash
from autopar.planner.prices import Prices
from autopar.planner.residency import Residency
from autopar.planner.resolve import residency_of, resolve
from autopar.planner.stage_plans import StageCosts, sent_bytes, stage_costs
from autopar.schedules.actions import Schedule
from autopar.schedules.generate import Request, generate
from autopar.schedules.memory import StageMemory
from autopar.schedules.timing import bubble_fraction, simulate_schedule
from autopar.sharding.assignment import Assignment
from autopar.sharding.discovery.book import RuleBook
from autopar.sharding.layout import Layout
from autopar.stages.assign import Anatomy, anatomy
from autopar.stages.microbatch import Microbatches, batch_size, cut_microbatches, independent_microbatches
from autopar.stages.stage_programs import StageProgram
from autopar.stages.staged import Staged, stage_program

V_SHAPED = ("zb-v",)
FITTING_ROUNDS = 3  # how often stages are planned again where microbatches in flight exceed the memory
PIPELINE_AXES = ("pp", "pipe", "pipeline", "stage")


@dataclass(frozen=True)
class PipelineRequest:
    """What the caller asked for; None is the planner's to choose."""

    stages: int | None = None
    schedule: str | None = None
    microbatches: int | None = None

    @property
    def is_asynchronous(self) -> bool:
        """Whether weights are updated between microbatches, which are then batches of their own."""
        return self.schedule is not None and self.schedule.startswith("pipedream")

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
    return cut_at_equal_times(cut_microbatches(program, microbatches, rules.rules_of), mesh, stages)


def cut_at_equal_times(pieces: Microbatches, mesh: Mesh, stages: int) -> Staged:
    """Stages of equal time by the planner's prices."""
    found = anatomy(pieces.pieces[0])
    cuts = balanced_cuts(places(found, Prices(mesh)), stages, [1.0] * stages) if stages > 1 else ()
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


@dataclass(frozen=True)
class PlannedPipeline:
    """A plan with stages, and all that running it needs."""

    plan: Plan
    staged: Staged
    schedule: Schedule
    stages: tuple[Planned, ...]
    rules: RuleBook  # of the whole program
    axis: int
    stage_peaks: tuple[int, ...]  # bytes of each stage on its ranks, all its microbatches in flight included


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
    staged = _staged(program, inner, stages, request, rules)
    result = finished(mesh, axis, staged, plan_stages(staged, inner, options), rules, options, request)
    for _ in range(FITTING_ROUNDS):
        if result.plan.peak_bytes <= options.limit(mesh):
            break
        limits = _tighter(result, options.limit(mesh))
        result = finished(mesh, axis, staged, plan_stages(staged, inner, options, limits), rules, options, request)
    if result.plan.peak_bytes > options.limit(mesh):
        raise MemoryLimitError(
            f"the fullest rank needs {result.plan.peak_bytes} bytes with its microbatches in flight, "
            f"{options.limit(mesh)} are allowed",
            fix="use more microbatches, more stages, or 1f1b, which holds the fewest",
        )
    return result


def _tighter(result: PlannedPipeline, limit_bytes: int) -> list[int]:
    """What each stage may hold for one microbatch, so that its rank keeps to the limit with all that are in flight."""
    used = [0] * len(result.schedule.ranks)
    for stage, peak in zip(result.plan.stages, result.stage_peaks, strict=True):
        used[stage.rank] += peak
    return [
        max(1, int(stage.plan.peak_bytes * limit_bytes / used[stage.rank]))
        if used[stage.rank] > limit_bytes
        else stage.plan.peak_bytes + (limit_bytes - used[stage.rank]) // result.schedule.virtual_stages
        for stage in result.plan.stages
    ]


def _staged(program: Program, mesh: Mesh, stages: int, request: PipelineRequest, rules: RuleBook) -> Staged:
    """With the microbatches asked for, or as many as two per stage where the program can be cut so.

    For an asynchronous schedule `program` is that of one microbatch.
    """
    if request.is_asynchronous:
        pieces = independent_microbatches(program, request.microbatches or stages)
        staged = cut_at_equal_times(pieces, mesh, stages)
        _refuse_shared(staged, request)
        return staged
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
    peaks = [cost.peak_bytes(count) for cost, count in zip(costs, in_flight, strict=True)]
    peak = max(sum(peaks[stage] for stage in schedule.stages_of(rank)) for rank in range(ranks))
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
    return PlannedPipeline(plan, staged, schedule, planned, rules, axis, tuple(peaks))


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
    pipeline = plan.pipeline
    assert pipeline is not None
    if plan.mesh_shape != mesh.shape:
        raise PlanError(
            f"the plan is for a mesh of {plan.mesh_shape}, this mesh is {mesh.shape}", fix="plan again for this mesh"
        )
    request = PipelineRequest(len(plan.stages), pipeline.schedule, pipeline.microbatches)
    rules, inner = options.rule_book(mesh), without_axis(mesh, pipeline.axis)
    if request.is_asynchronous:
        pieces = independent_microbatches(program, pipeline.microbatches)
    else:
        pieces = cut_microbatches(program, pipeline.microbatches, rules.rules_of)
    staged = stage_program(pieces, _cuts_at(anatomy(pieces.pieces[0]), plan))
    layouts = _boundary_of(plan)
    planned = tuple(
        price_choice(stage.program, inner, options, partial(_picked, plan=own.plan, layouts=layouts), plan.search)
        for stage, own in zip(staged.stages, plan.stages, strict=True)
    )
    return finished(mesh, pipeline.axis, staged, planned, rules, options, request)


def _picked(
    planning: PlanningProblem, *, plan: Plan, layouts: Mapping[str, Layout]
) -> tuple[tuple[int, ...], Residency]:
    return resolve(planning, plan, layouts), residency_of(planning.decisions, plan)


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
