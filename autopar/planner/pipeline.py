"""A plan with a pipeline: microbatches, cuts, a plan for each stage, a schedule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from autopar.capture.program import InputKind, OutputKind, Program
from autopar.errors import ConstraintError, InputError, MemoryLimitError, PlanError, ScheduleError
from autopar.folding import name_matches
from autopar.mesh import Mesh
from autopar.planner.constraints import Constraint
from autopar.planner.cut_answers import CutAnswers
from autopar.planner.decisions import result_key
from autopar.planner.hosting import SharedParameters
from autopar.planner.make import Options, Planned, plan_program
from autopar.planner.pipeline_plan import PlannedPipeline, finished
from autopar.planner.pipeline_request import V_SHAPED, PipelineRequest, pipeline_axis
from autopar.planner.pipeline_search import PipelineSearch
from autopar.planner.stage_hosting import Hosted, hosted_names, kept_on_devices
from autopar.planner.stage_search import Proposal
from autopar.schedules.actions import Placement, rank_of
from autopar.sharding.layout import Layout
from autopar.stages.stage_programs import StageProgram
from autopar.stages.staged import Staged

TRIED = 3  # proposals that are planned until one fits
MARGIN = 1.02  # recomputing needs some room of its own
FITTING_ROUNDS = 6  # how often stages are planned again where microbatches in flight exceed the memory


class Effort(Enum):
    """What is done with stages that hold too much: they recompute more under the same layouts, or are planned anew."""

    RECOMPUTE = auto()
    REPLAN = auto()


def plan_stages(
    staged: Staged,
    mesh: Mesh,
    options: Options,
    rooms: Sequence[Room] = (),
    before: Sequence[Planned] = (),
    effort: Effort = Effort.REPLAN,
) -> tuple[Planned, ...]:
    """A plan for each stage on its own mesh; what goes between two of them lies the same on both sides.

    `rooms`: of each stage. `before`: the plans of the same stages that some rooms were too small for; the others stay,
    where what is fixed by earlier stages is as it was.
    """
    boundary: dict[str, Layout] = {}
    shared: dict[str, Layout] = {}
    found: list[Planned] = []
    places: dict[str, bool] = {}  # of shared parameters, whether they lie on the host
    kept = kept_on_devices(staged)
    constraints = _by_stage(staged.stages, options.constraints)
    for stage, own in zip(staged.stages, constraints, strict=True):
        known = {key: layout for key, layout in boundary.items() if key in boundary_keys(stage.program)}
        own_options = replace(
            options,
            constraints=own,
            parameter_layouts={**shared, **(options.parameter_layouts or {})} or None,
            boundary_layouts=known,
            time_limit_s=options.time_limit_s / len(staged.stages),
            memory_limit_bytes=rooms[stage.index].limit_bytes if rooms else options.memory_limit_bytes,
            microbatches=staged.microbatches.of_a_step,
            kept_on_device=kept,
            hosted=None if options.hosted is None else options.hosted - kept.keys(),
            shared=SharedParameters(frozenset(staged.first.shared), dict(places)),
        )
        if before:
            planned = _again(before[stage.index], mesh, own_options, rooms[stage.index], effort)
        else:
            planned = plan_program(stage.program, mesh, own_options)
        found.append(planned)
        boundary.update(offered_layouts(stage.program, planned))
        here = _parameter_layouts(stage.program, planned, staged.variants[0].shared)
        shared.update(here)
        places.update(dict.fromkeys(here, False) | dict.fromkeys(here.keys() & hosted_names(planned), True))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Room:
    """What a stage may hold for one microbatch, and by how much its last plan saves too much of every microbatch."""

    limit_bytes: int
    less_bytes: int = 0


def _again(last: Planned, mesh: Mesh, options: Options, room: Room, effort: Effort) -> Planned:
    """The plan of a stage under other options, from the last one.

    Where less memory is all that is other, its layouts stay if recomputing makes them fit: a plan sees one microbatch,
    but what parameters that are cut finer send and sum, every microbatch does.
    """
    planner, limit = last.planner, room.limit_bytes
    if replace(planner.options, memory_limit_bytes=options.memory_limit_bytes) != options:
        return plan_program(planner.program, mesh, options)
    if last.plan.peak_bytes <= limit:
        return last
    saving = planner.saving_less(last.best, room.less_bytes) if room.less_bytes else None
    if saving is None and room.less_bytes and effort is Effort.RECOMPUTE:
        raise MemoryLimitError(
            f"a stage holds {room.less_bytes} bytes too much of every microbatch in flight, whatever it recomputes",
            fix="use more microbatches, more stages, or 1f1b, which holds the fewest",
        )
    return saving or planner.under(limit)


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
    return any(name_matches(name, constraint.pattern) for name in names)


def plan_pipeline(program: Program, mesh: Mesh, options: Options, request: PipelineRequest) -> PlannedPipeline:
    """Plan a program as a pipeline along one axis of the mesh. Raises MemoryLimitError where nothing tried fits.

    Where no number of microbatches fits, one is tried, as the gradients of several are held beside their sum, and
    parameters are put on the host; the faster of both is taken. Then all that may be are put there.
    """
    _refuse_input_gradients(program)
    options = options.of_stages
    axis = pipeline_axis(mesh, request.stages)
    assert axis is not None, "no axis of the mesh is the pipeline's"
    search = PipelineSearch(program, mesh, axis, options, request, options.rule_book(mesh))
    try:
        return _first_that_fits(search)
    except MemoryLimitError as error:
        whole = search.of_one_microbatch()
        some, every = ([it and it.on_host(which) for it in (search, whole)] for which in (Hosted.ANY, Hosted.ALL))
        for further in ((some[0], whole), (some[1],), every):
            found = _fitting(further)
            if found:
                return min(found, key=lambda it: it.plan.step_s)
        beside = ", nor with parameters on the host" if some[0] is not None else ""
        raise MemoryLimitError(f"{error.what}{beside}", where=error.where, fix=error.fix) from error


def _fitting(searches: Iterable[PipelineSearch | None]) -> list[PlannedPipeline]:
    """What further searches find."""
    found = []
    for search in searches:
        with suppress(PlanError, ScheduleError, MemoryLimitError):
            found += [] if search is None else [_first_that_fits(search)]
    return found


def _first_that_fits(search: PipelineSearch) -> PlannedPipeline:
    """The fastest proposal that fits as its stages are first planned, but for what they recompute; where none of a few
    does, the fastest of them whose stages can be planned anew to fit."""
    attempts = _Attempts(search, Effort.RECOMPUTE)
    try:
        return attempts.run()
    except MemoryLimitError:
        return replace(attempts, effort=Effort.REPLAN).run()


@dataclass
class _Attempts:
    """Proposals planned, one after the other."""

    search: PipelineSearch
    effort: Effort
    first: dict[tuple[int, tuple[int, ...]], tuple[Planned, ...]] = field(default_factory=dict)  # by count and cuts

    def run(self) -> PlannedPipeline:
        """After a proposal that does not fit only those that hold less are tried; the last is the one that holds least.

        Raises what the first one raised.
        """
        refused: MemoryLimitError | ScheduleError | None = None
        held, left = self.search.held_samples, self.search.proposals()
        for tried in range(TRIED):
            if not left:
                break
            proposal = left[0] if tried < TRIED - 1 else min(left, key=held)
            try:
                return self._planned(self.search.exact(proposal))
            except (MemoryLimitError, ScheduleError) as error:
                refused = refused or error
            left = [it for it in left if held(it) < held(proposal)]
        assert refused is not None
        raise refused

    def _planned(self, proposal: Proposal) -> PlannedPipeline:
        """A proposal planned, stage by stage; stages that hold too much with all in flight have less room again."""
        search, limits = self.search, self.search.limits_bytes
        staged = search.staged(proposal)
        request = replace(
            search.request,
            stages=len(staged.stages),
            schedule=proposal.schedule,
            microbatches=proposal.microbatches,
        )
        placement: Placement = "v" if proposal.schedule in V_SHAPED else "loop"
        own = [Room(limits[rank_of(stage, len(limits), placement)]) for stage in range(len(staged.stages))]
        planned: tuple[Planned, ...] = ()
        for _ in range(FITTING_ROUNDS + 1):
            planned = self._stages(staged, proposal, own, planned)
            result = finished(search.mesh, search.axis, staged, planned, search.rules, search.options, request)
            if _fits(result, limits):
                cutting = CutAnswers(search, proposal.microbatches, proposal.schedule, proposal.cuts)
                return replace(result, plan=replace(result.plan, cutting=cutting))
            own = _tighter(result, limits)
        raise _too_full(result, limits)

    def _stages(
        self, staged: Staged, proposal: Proposal, rooms: Sequence[Room], before: Sequence[Planned]
    ) -> tuple[Planned, ...]:
        """The stages' plans. The first ones are the same under every schedule where all ranks may hold as much."""
        search = self.search
        if before:
            return plan_stages(staged, search.inner, search.options, rooms, before, self.effort)
        key = proposal.microbatches, proposal.cuts
        if key not in self.first or len(set(search.limits_bytes)) > 1:
            self.first[key] = plan_stages(staged, search.inner, search.options, rooms)
        return self.first[key]


def _too_full(result: PlannedPipeline, limits: Sequence[int]) -> MemoryLimitError:
    return MemoryLimitError(
        f"the fullest rank needs {result.plan.peak_bytes} bytes with its microbatches in flight, "
        f"{min(limits)} are allowed",
        fix="use more microbatches, more stages, or 1f1b, which holds the fewest",
    )


def _fits(result: PlannedPipeline, limits: Sequence[int]) -> bool:
    return all(used <= limit for used, limit in zip(result.rank_peaks, limits, strict=True))


def _tighter(result: PlannedPipeline, limits: Sequence[int]) -> list[Room]:
    """What each stage may hold, so that its rank keeps to its limit with all microbatches that are in flight.

    What a rank holds too much is taken from all that it has in flight, but where parameters are on the host from one
    microbatch of each of its stages: it is freed once by one more there. A rank that fits stays as it is.
    """
    held, idle = [0] * len(limits), [0] * len(limits)
    stages = Counter(stage.rank for stage in result.plan.stages)
    for stage in result.plan.stages:
        held[stage.rank] += stage.in_flight
        idle[stage.rank] += max(0, stage.in_flight - 1)
    own = []
    for stage in result.plan.stages:
        over = MARGIN * max(0, result.rank_peaks[stage.rank] - limits[stage.rank])
        is_hosted = bool(result.stages[stage.number].assignment.hosted)
        shares = stages[stage.rank] if is_hosted else max(1, held[stage.rank])
        limit = max(1, stage.plan.peak_bytes - math.ceil(over / shares))
        own.append(Room(limit, math.ceil(over / idle[stage.rank]) if idle[stage.rank] else 0))
    return own


def _refuse_input_gradients(program: Program) -> None:
    for output in program.outputs:
        if output.kind is OutputKind.GRADIENT and output.name.startswith("input:"):
            raise InputError(
                f"{output.name.removeprefix('input:')!r} requires a gradient, which a pipeline does not return",
                fix="detach it, or compute what leads to it inside of the model",
            )
