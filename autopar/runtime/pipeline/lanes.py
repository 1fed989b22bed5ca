"""The ranks that share one stage: this process' own, or all of them in lockstep in one process.

A value of a stage is a list with one local tensor per lane: one lane where ranks are processes, all where they are
virtual. Whatever follows a schedule is written once, over lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh

from autopar.passes.local_call import RankGeometry
from autopar.runtime.lockstep import run_lockstep
from autopar.runtime.memory_tracker import LockstepMemory
from autopar.runtime.parameters import full_value, in_layout
from autopar.sharding.execution import distribute, recombine
from autopar.sharding.layout import REPLICATE, Layout

Value = list[Tensor]  # one local tensor per lane


class Lanes(Protocol):
    """Runs graphs and lays out values for the ranks of one stage."""

    def run(self, graphs: Sequence[fx.GraphModule], inputs: list[list[Tensor]]) -> list[list[Tensor]]:
        """The outputs of each lane's boxed graph on its inputs, which are emptied."""

    def sum(self, first: Value, second: Value) -> Value:
        """Each lane's sum."""

    def settle_host(self) -> None:
        """Wait until all copies to the host and back are complete: what lies there may then be read and written."""

    def laid_out(self, full: Tensor, layout: Layout) -> Value:
        """Each lane's part of a full value."""

    def full(self, value: Value, layout: Layout, shape: Sequence[int]) -> Tensor:
        """The full value of which the lanes hold parts. With real ranks, all of the stage take part."""


@dataclass(frozen=True)
class RealLane:
    """This process, one rank of the mesh of its stage."""

    mesh: DeviceMesh

    def run(self, graphs: Sequence[fx.GraphModule], inputs: list[list[Tensor]]) -> list[list[Tensor]]:
        with torch.autocast(self.mesh.device_type, enabled=False):
            return [list(graphs[0](inputs[0]))]

    def sum(self, first: Value, second: Value) -> Value:
        return [first[0] + second[0]]

    def settle_host(self) -> None:
        if self.mesh.device_type != "cpu":
            torch.accelerator.current_stream().synchronize()

    def laid_out(self, full: Tensor, layout: Layout) -> Value:
        return [in_layout(full, self.mesh, layout)]

    def full(self, value: Value, layout: Layout, shape: Sequence[int]) -> Tensor:
        return full_value(value[0], self.mesh, layout, shape)


@dataclass(frozen=True)
class VirtualLanes:
    """All ranks of the mesh of a stage, in lockstep in this process."""

    geometries: tuple[RankGeometry, ...]
    memory: LockstepMemory

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.geometries[0].mesh_shape

    def run(self, graphs: Sequence[fx.GraphModule], inputs: list[list[Tensor]]) -> list[list[Tensor]]:
        return [list(lane) for lane in run_lockstep(graphs, inputs, self.memory)]

    def sum(self, first: Value, second: Value) -> Value:
        sums = []
        for rank, (one, other) in enumerate(zip(first, second, strict=True)):
            with self.memory.on_rank(rank):
                sums.append(one + other)
        return sums

    def settle_host(self) -> None:
        """The host is the device."""

    def held(self, value: Value) -> Value:
        """The same value, counted as what each lane holds."""
        for tracker, part in zip(self.memory.trackers, value, strict=True):
            tracker.hold([part])
        return value

    def held_on_host(self, value: Value) -> Value:
        """The same value, counted as what each lane holds on the host."""
        for tracker, part in zip(self.memory.trackers, value, strict=True):
            tracker.hold([part], on_host=True)
        return value

    def laid_out(self, full: Tensor, layout: Layout) -> Value:
        if all(placement == REPLICATE for placement in layout):
            return [full.contiguous()] * len(self.geometries)
        return [shard.clone() for shard in distribute(full, layout, self._shape)]

    def full(self, value: Value, layout: Layout, shape: Sequence[int]) -> Tensor:
        return recombine(value, layout, self._shape)
