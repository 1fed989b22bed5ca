"""What a caller asks of a pipeline, and which axis of the mesh it takes."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import MeshError
from autopar.mesh import Mesh

V_SHAPED = ("zb-v",)
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
