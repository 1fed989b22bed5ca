"""What an optimizer keeps for each parameter, and how much of it each rank holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import UnsupportedOptionError
from autopar.optim.blocks import blocks_align
from autopar.optim.sharded_state import state_layout
from autopar.sharding.layout import REPLICATE, Layout, local_shape, shard_dim
from autopar.sharding.op_call import TensorSpec


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor per parameter: as long as the parameter in `dims` (None: all), 1 long in the others, cut as it is.

    `itemsize`: bytes per element; None as the parameter's. `block`: instead, one element for each so many elements of
    the full parameter, kept by all ranks unless their shards are whole blocks.
    """

    dims: tuple[int, ...] | None
    itemsize: int | None = None
    block: int = 0

    def bytes(self, spec: TensorSpec, layout: Layout, mesh_shape: tuple[int, ...]) -> int:
        """What the rank with the largest shard holds of it."""
        itemsize = spec.dtype.itemsize if self.itemsize is None else self.itemsize
        if self.block:
            count = -(-math.prod(spec.shape) // self.block)
            aligned = blocks_align(spec.shape, layout, mesh_shape, self.block)
            return itemsize * (local_shape((count,), layout, mesh_shape)[0] if aligned else count)
        dims = range(len(spec.shape)) if self.dims is None else self.dims
        shape = [size if dim in dims else 1 for dim, size in enumerate(spec.shape)]
        kept = tuple(item if shard_dim(item) in dims else REPLICATE for item in layout)
        return itemsize * math.prod(local_shape(shape, kept, mesh_shape))


@dataclass(frozen=True)
class Optimizer:
    """What the planner knows of an optimizer.

    `state`: by the parameter's number of dims, what it keeps; none: no optimizer is counted. `large`: what it keeps
    instead for parameters of at least `least_large` elements. `shards_replicas`: whether ranks that hold the same shard
    of a parameter divide its state among them (`autopar.optim.ShardedState`, ZeRO-1); `scatters_gradients`: and its
    gradient (ZeRO-2). `on_host`: whether the state is on the device only while its parameter is stepped
    (`autopar.optim.HostState`).
    """

    name: str
    state: tuple[tuple[StateTensor, ...], ...] = ()
    large: tuple[StateTensor, ...] = ()
    least_large: int = 0
    shards_replicas: bool = False
    scatters_gradients: bool = False
    on_host: bool = False

    def of(self, spec: TensorSpec) -> tuple[StateTensor, ...]:
        """What it keeps for one parameter."""
        if not self.state:
            return ()
        if self.large and math.prod(spec.shape) >= self.least_large:
            return self.large
        if len(spec.shape) >= len(self.state):
            raise UnsupportedOptionError(
                f"the state that {self.name} keeps for a parameter of {len(spec.shape)} dims is not known",
                fix="leave optimizer out, and leave room for its state with memory_limit_bytes",
            )
        return self.state[len(spec.shape)]

    def layout(self, spec: TensorSpec, layout: Layout, mesh_shape: Sequence[int]) -> Layout:
        """How the state of a parameter that lies in `layout` is cut."""
        return state_layout(spec.shape, layout, mesh_shape) if self.shards_replicas else layout

    def gradient_layout(self, spec: TensorSpec, layout: Layout, mesh_shape: Sequence[int]) -> Layout:
        """How the gradient of a parameter that lies in `layout` leaves the backward."""
        return state_layout(spec.shape, layout, mesh_shape) if self.scatters_gradients else layout

    def bytes(self, spec: TensorSpec, layout: Layout, mesh_shape: Sequence[int]) -> int:
        """State of one parameter that the fullest rank holds on its device, step counts left out."""
        return self.all_bytes(spec, layout, mesh_shape) - self.host_bytes(spec, layout, mesh_shape)

    def host_bytes(self, spec: TensorSpec, layout: Layout, mesh_shape: Sequence[int]) -> int:
        """The same on its host; what has no dims stays on the device."""
        return self.all_bytes(spec, layout, mesh_shape) if self.on_host and spec.shape else 0

    def all_bytes(self, spec: TensorSpec, layout: Layout, mesh_shape: Sequence[int]) -> int:
        """The same wherever it is, and what is on the device while the parameter is stepped."""
        cut = self.layout(spec, layout, mesh_shape)
        return sum(item.bytes(spec, cut, tuple(mesh_shape)) for item in self.of(spec))
