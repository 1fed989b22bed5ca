"""What a caller asks of a pipeline, and which axis of the mesh it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.capture.program import Program
from autopar.errors import MeshError, UnsupportedOptionError
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.plan_entries import ACCUMULATED, SEMANTICS, WHOLE
from autopar.stages.accumulated import accumulated_microbatches
from autopar.stages.microbatch import Microbatches, cut_microbatches, independent_microbatches
from autopar.stages.time_layouts import RulesOf

V_SHAPED = ("zb-v",)
PIPELINE_AXES = ("pp", "pipe", "pipeline", "stage")


@dataclass(frozen=True)
class PipelineRequest:
    """What the caller asked for; None is the planner's to choose."""

    stages: int | None = None
    schedule: str | None = None
    microbatches: int | None = None
    accumulated: bool = False  # a microbatch is a batch by itself, between two updates: gradient accumulation

    @property
    def is_asynchronous(self) -> bool:
        """Whether weights are updated between microbatches, which are then batches of their own."""
        return self.schedule is not None and self.schedule.startswith("pipedream")

    @property
    def are_batches(self) -> bool:
        """Whether each microbatch is a batch by itself, of which the program is captured."""
        return self.is_asynchronous or self.accumulated

    def pieces(self, program: Program, count: int, rules_of: RulesOf) -> Microbatches:
        """A program as the microbatches asked for. Raises MicrobatchError where that would not be the model."""
        if self.accumulated:
            return accumulated_microbatches(program, count)
        if self.is_asynchronous:
            return independent_microbatches(program, count)
        return cut_microbatches(program, count, rules_of)

    @property
    def text(self) -> str:
        """One line per option: what ranks compare."""
        return f"stages {self.stages}\nschedule {self.schedule}\nmicrobatches {self.microbatches}\n{self.semantics}"

    @property
    def semantics(self) -> str:
        """What a microbatch is: a part of the `whole` batch, or a batch whose gradients are `accumulated`."""
        return ACCUMULATED if self.accumulated else WHOLE


def is_accumulated(batch_semantics: str | None) -> bool:
    """Whether microbatches are to be batches by themselves. Raises UnsupportedOptionError for what says neither."""
    if batch_semantics not in (None, *SEMANTICS):
        raise UnsupportedOptionError(
            f"batch_semantics={batch_semantics!r} says nothing of microbatches",
            fix=f"use one of {', '.join(SEMANTICS)}",
        )
    return batch_semantics == ACCUMULATED


def followed_request(request: PipelineRequest, plan: Plan | None) -> PipelineRequest:
    """What is asked for: a given plan's own pipeline, if it has one."""
    if plan is None or plan.pipeline is None:
        return request
    own = plan.pipeline
    return PipelineRequest(len(plan.stages), own.schedule, own.microbatches, own.batch_semantics == ACCUMULATED)


def pipeline_axis(mesh: Mesh, stages: int | None, *, wanted: bool = True) -> int | None:
    """The mesh axis of the pipeline: one named for it, else the first as long as there are stages; None for neither.

    One of one rank, without stages, is a pipeline's only where one is `wanted`: gradients are accumulated there.
    """
    named = [axis for axis, name in enumerate(mesh.axis_names) if name in PIPELINE_AXES]
    if named:
        return named[0] if mesh.shape[named[0]] > 1 or stages not in (None, 1) or wanted else None
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
    alike = replace(mesh.profile, rank_speeds=(), rank_memory_bytes=())  # how ranks differ is the pipeline's to see
    return Mesh(shape or (1,), names or ("one",), hardware=alike, device_type=mesh.device_type)


def rank_speeds(mesh: Mesh, axis: int) -> tuple[float, ...]:
    """The speed of each pipeline rank: that of the slowest device of its stages."""
    return tuple(min(mesh.profile.speed(rank) for rank in ranks) for ranks in _lines(mesh, axis))


def rank_limits(mesh: Mesh, axis: int, limit_bytes: int | None, fraction: float) -> tuple[int, ...]:
    """What each pipeline rank may hold: what the caller allows, or a fraction of its smallest device."""
    if limit_bytes is not None:
        return (limit_bytes,) * mesh.shape[axis]
    return tuple(int(min(mesh.profile.memory_bytes(rank) for rank in ranks) * fraction) for ranks in _lines(mesh, axis))


def _lines(mesh: Mesh, axis: int) -> list[list[int]]:
    """Per pipeline rank, the ranks of its stages."""
    places = [mesh.coordinates(rank)[axis] for rank in range(mesh.size)]
    return [[rank for rank, place in enumerate(places) if place == at] for at in range(mesh.shape[axis])]
