"""This process as one rank of a pipeline: where it stands, its links to other stages, and what it shares with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.pipeline.channels import Links, Message, lost_rank
from autopar.schedules.actions import NONE


class PipelineRank:
    """`mesh`: of all stages. `stage_mesh`: of this rank's stages, all axes of `mesh` but the pipeline's."""

    def __init__(self, mesh: DeviceMesh, axis: int) -> None:
        self.mesh, self.axis = mesh, axis
        coordinates = mesh.get_coordinate()
        assert coordinates is not None, "this rank is not part of the mesh"
        self.rank = coordinates[axis]
        self.coordinates = tuple(coordinates)
        line = mesh.mesh[tuple(slice(None) if at == axis else here for at, here in enumerate(coordinates))]
        self.line = tuple(int(rank) for rank in line)  # the ranks at this place of all stages
        self.group: Any = mesh.get_group(axis)
        self.stage_mesh = self._stage_mesh()

    def _stage_mesh(self) -> DeviceMesh:
        others = [at for at in range(self.mesh.ndim) if at != self.axis]
        own = self.mesh.mesh.select(self.axis, self.rank)
        if not others:
            group = dist.new_group([int(own)], use_local_synchronization=True)
            return DeviceMesh.from_group([group], self.mesh.device_type, mesh=own.reshape(1), mesh_dim_names=("one",))
        names = self.mesh.mesh_dim_names
        kept = tuple(names[at] for at in others) if names else tuple(f"axis{at}" for at in others)
        groups = [self.mesh.get_group(at) for at in others]
        return DeviceMesh.from_group(groups, self.mesh.device_type, mesh=own, mesh_dim_names=kept)

    @cached_property
    def links(self) -> Links:
        """Channels to other stages; made by all ranks of the line together."""
        ranks = sorted(self.line)
        up, down = (dist.new_group(ranks, use_local_synchronization=True, group_desc=way) for way in ("up", "down"))
        return Links(self.line, self.rank, up, down, self.mesh.device_type)

    def broadcast(self, value: Tensor, source: int) -> Tensor:
        """`value` as the pipeline rank `source` has it, on all of them, in place."""
        try:
            dist.broadcast(value, group=self.group, group_src=source)
        except RuntimeError as error:
            raise lost_rank(f"a result of pipeline rank {source}", "a rank of another stage", error) from error
        return value

    def from_first(self, value: Tensor) -> Tensor:
        """`value` as the first stage's ranks have it."""
        return self.broadcast(value, 0) if len(self.line) > 1 else value

    def summed(self, name: str, part: Tensor, holders: Sequence[int]) -> Tensor:
        """The sum of the parts of a gradient that these pipeline ranks hold, on each of them.

        Parts are added in the order of the ranks, so that all of them get the same sum.
        """
        others, what = [rank for rank in holders if rank != self.rank], f"gradient of {name}"
        for other in others:
            self.links.send(Message(what, self.rank, other, NONE), other, [[part]])
        coming = {other: self.links.receive(Message(what, other, self.rank, NONE), other, [[part]]) for other in others}
        parts = {self.rank: part}
        for other, incoming in coming.items():
            ((parts[other],),) = incoming.values()
        total = reduce(torch.add, [parts[rank] for rank in sorted(parts)])
        self.links.finish()
        return total
