"""What a compiled step is to the runtime, who makes one, and where this rank stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.program import Program
from autopar.passes.expert_places import ExpertPlaces, Groups
from autopar.passes.local_call import RankGeometry
from autopar.passes.pipeline import LocalProgram
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout import Layout


class PlanLike(Protocol):
    """All that the runtime asks of a plan: a hash, equal on ranks whose plans are equal."""

    @property
    def hash(self) -> str: ...


@dataclass(frozen=True)
class CompiledStep:
    """One program under one plan, emitted for this rank."""

    program: Program
    assignment: Assignment
    local: LocalProgram
    plan: PlanLike


class ExpertCompiler(Protocol):
    """Says where experts are best placed, and what copies of them take; called on one rank, or on each by itself."""

    def place_experts(
        self,
        load: Sequence[Sequence[float]],
        current: Sequence[ExpertPlaces],
        *,
        replicas: int | None,
        move_cost: float,
        time_limit_s: float,
    ) -> Sequence[tuple[Groups, Groups]]:
        """By layer, what each group of ranks is to compute, `replicas` slots in all, and to own.

        `load`: [layers, experts]. `current`: where they are now.
        """

    def copy_bytes(self, plan: PlanLike, planned: LocalProgram, copied: LocalProgram) -> int:
        """By how much a rank holds more at most, at this or another of a plan's stages, with copies of experts.

        Raises MemoryLimitError where that goes beyond the plan's limit.
        """


class StepCompiler(ExpertCompiler, Protocol):
    """Makes compiled steps; called on all ranks at once."""

    def compile_step(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        parameter_layouts: Mapping[str, Layout] | None,
        hosted: frozenset[str] | None,
    ) -> CompiledStep:
        """Capture, plan and emit `model(*args, **kwargs)` in the modes (training, gradients, autocast) of the moment.

        `parameter_layouts`, if given, are fixed, and so is which parameters are `hosted`, on the host: another shape or
        mode of a model whose parameters lie there already.
        """


def geometry_of(mesh: DeviceMesh) -> RankGeometry:
    """Where this rank stands in a mesh of real processes."""
    coordinates = mesh.get_coordinate()
    assert coordinates is not None, "this rank is not part of the mesh"
    shape = tuple(mesh.shape)
    return RankGeometry(
        mesh_shape=shape,
        coordinates=tuple(coordinates),
        group_names=tuple(mesh.get_group(axis).group_name for axis in range(len(shape))),
        device=mesh.device_type,
    )
