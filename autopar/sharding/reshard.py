"""Paths from one layout to another, in steps of one mesh axis each.

The path depends on shapes alone: the fewest bytes sent, where a byte over an outer mesh axis counts twice a byte over
the next inner one (outer axes span nodes). So the program that the passes emit is the one that the planner has priced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import dijkstra
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.errors import UnreachableLayoutError
from autopar.sharding.layout import REPLICATE, Layout, format_layout, is_partial, shard_dim
from autopar.sharding.op_call import TensorSpec

End = Literal["first", "last"]  # of a path
Cells = tuple[npt.NDArray[np.intp], ...]  # an open mesh of rows and columns, as of np.ix_
Price = Callable[[str, int, int], float]
"""Seconds of (collective, "slice" or "copy", bytes, mesh axis)."""

OUTER_AXIS_WEIGHT = 2.0  # of a byte, relative to the next inner axis
LATENCY_BYTES = 65536.0  # a collective's start is worth this many bytes: 1 to 2 us at tens of GB/s
COPY_WEIGHT = 1 / 16  # of a byte copied in device memory, relative to a byte sent over the innermost axis
KINDS = ("slice", "all_gather", "all_reduce", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, slots=True)
class Step:
    """A change of placement on one mesh axis.

    `collective`: all_gather, all_reduce, reduce_scatter, all_to_all, or None for a local slice. `bytes`: of the full
    tensor over the axis' group, padding included: what all_gather returns, what reduce_scatter, all_reduce and a slice
    take, the whole local buffer of all_to_all; on the rank at the mesh's origin, which holds the largest shards.
    `copied_bytes`: what is copied on the way: padding, chunks that a collective wants or leaves in another order, and
    the copy that all_reduce works on.
    """

    axis: int
    source: Placement
    target: Placement
    collective: str | None
    bytes: int
    copied_bytes: int = 0
    seconds: float = 0.0


def reshard_steps(
    spec: TensorSpec, source: Layout, target: Layout, mesh_shape: Sequence[int], step_seconds: Price
) -> tuple[Step, ...]:
    """The path of `reshard_path`, priced."""
    path = reshard_path(spec, source, target, tuple(mesh_shape))
    return tuple(replace(step, seconds=_step_seconds(step, step_seconds)) for step in path)


def _step_seconds(step: Step, price: Price) -> float:
    copies = price("copy", step.copied_bytes, step.axis) if step.copied_bytes else 0.0
    return price(step.collective or "slice", step.bytes, step.axis) + copies


@lru_cache(maxsize=65536)
def reshard_path(spec: TensorSpec, source: Layout, target: Layout, mesh_shape: tuple[int, ...]) -> tuple[Step, ...]:
    """The steps that carry `source` to `target`; UnreachableLayoutError if there are none."""
    source, target = effective_layout(source, mesh_shape), effective_layout(target, mesh_shape)
    if source == target:
        return ()
    paths = _paths(spec.shape, spec.dtype.itemsize, mesh_shape, _reduction(source))
    start, end = paths.index.get(source, -1), paths.index.get(target, -1)
    if min(start, end) < 0 or not np.isfinite(paths.distance[start, end]):
        raise UnreachableLayoutError(f"no collectives lead from {format_layout(source)} to {format_layout(target)}")
    steps: list[Step] = []
    while end != start:
        before = int(paths.previous[start, end])
        steps.append(paths.step(before, end))
        end = before
    return tuple(reversed(steps))


def reshard_seconds_matrix(
    spec: TensorSpec, sources: Sequence[Layout], targets: Sequence[Layout], mesh_shape: Sequence[int], price: Price
) -> npt.NDArray[np.float64]:
    """Seconds from each source (row) to each target (column) along `reshard_path`; inf where there is no path."""
    matrix = np.full((len(sources), len(targets)), np.inf)
    for paths, cells, places in _known_cells(spec, sources, targets, tuple(mesh_shape)):
        matrix[cells] = _seconds(paths, paths.prices(price))[places]
    return matrix


def end_steps(
    spec: TensorSpec,
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    mesh_shape: Sequence[int],
    price: Price,
    *,
    end: End,
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """The last step (or the first) of the path from each source (row) to each target (column).

    Its kind, as an index into KINDS, and the seconds of its collective without copies; -1 and 0 where there is none.
    """
    kinds = np.full((len(sources), len(targets)), -1, dtype=np.intp)
    seconds = np.zeros((len(sources), len(targets)))
    for paths, cells, places in _known_cells(spec, sources, targets, tuple(mesh_shape)):
        step_kinds, step_seconds = _end_steps(paths, paths.collective_prices(price), end)
        kinds[cells], seconds[cells] = step_kinds[places], step_seconds[places]
    return kinds, seconds


def _known_cells(
    spec: TensorSpec, sources: Sequence[Layout], targets: Sequence[Layout], mesh: tuple[int, ...]
) -> Iterator[tuple[Paths, Cells, Cells]]:
    """By reduction: the paths, which (source, target) pairs they know, and where those pairs lie in them."""
    rows = [effective_layout(layout, mesh) for layout in sources]
    columns = [effective_layout(layout, mesh) for layout in targets]
    for reduction in sorted({_reduction(layout) for layout in rows}):
        paths = _paths(spec.shape, spec.dtype.itemsize, mesh, reduction)
        chosen = [row for row, layout in enumerate(rows) if _reduction(layout) == reduction and layout in paths.index]
        known = [column for column, layout in enumerate(columns) if layout in paths.index]
        starts = [paths.index[rows[row]] for row in chosen]
        ends = [paths.index[columns[column]] for column in known]
        yield paths, np.ix_(chosen, known), np.ix_(starts, ends)


@lru_cache(maxsize=4096)
def _end_steps(
    paths: Paths, prices: tuple[float, ...], end: End
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    return paths.end_steps(prices, end)


@lru_cache(maxsize=4096)
def _seconds(paths: Paths, prices: tuple[float, ...]) -> npt.NDArray[np.float64]:
    return paths.seconds(prices)


def effective_layout(layout: Layout, mesh_shape: Sequence[int]) -> Layout:
    """`layout` with the axes of a single rank replicated: there, all placements hold the same."""
    return tuple(placement if ranks > 1 else REPLICATE for placement, ranks in zip(layout, mesh_shape, strict=True))


def moves_once(source: Layout, target: Layout, mesh_shape: Sequence[int]) -> bool:
    """Whether the backward reads what the forward has moved, rather than moving the value again.

    So where the moved shard is no larger than its source (a sum taken, a slice, an exchange): saving it costs no more
    bytes than saving the source. A gather is repeated. Inputs of the program are there anyway: they are never saved.
    """
    ways = [
        math.prod(
            ranks for placement, ranks in zip(layout, mesh_shape, strict=True) if shard_dim(placement) is not None
        )
        for layout in (source, target)
    ]
    return ways[1] >= ways[0]


def _reduction(layout: Layout) -> str:
    """The reduction of a partial layout; sum for others, whose paths meet no partial."""
    return next((placement.reduce_op for placement in layout if isinstance(placement, Partial)), "sum")


@dataclass(frozen=True)
class Transitions:
    """Every valid step between layouts of tensors of one rank on one mesh, as arrays: one entry per step."""

    mesh_shape: tuple[int, ...]
    layouts: tuple[Layout, ...]
    start: npt.NDArray[np.intp]  # indices into layouts
    end: npt.NDArray[np.intp]
    axis: npt.NDArray[np.intp]
    kind: npt.NDArray[np.intp]  # indices into KINDS
    dim: npt.NDArray[np.intp]  # the dim that an all_to_all cuts

    @cached_property
    def index(self) -> dict[Layout, int]:
        return {layout: index for index, layout in enumerate(self.layouts)}

    def local_sizes(self, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """Sizes of the shard at the origin, [layout, dim]."""
        sizes = np.tile(np.array(shape, dtype=np.int64), (len(self.layouts), 1))
        for row, layout in enumerate(self.layouts):
            for placement, ranks in zip(layout, self.mesh_shape, strict=True):
                dim = shard_dim(placement)
                if dim is not None:
                    sizes[row, dim] = -(-sizes[row, dim] // ranks)
        return sizes


@lru_cache(maxsize=256)
def _transitions(rank: int, mesh_shape: tuple[int, ...], reduction: str) -> Transitions:
    choices: list[Placement] = [REPLICATE, Partial(reduction), *map(Shard, range(rank))]
    layouts = tuple(itertools.product(*(choices if ranks > 1 else [REPLICATE] for ranks in mesh_shape)))
    index = {layout: row for row, layout in enumerate(layouts)}
    found = []
    for row, layout in enumerate(layouts):
        for axis, target in itertools.product(range(len(mesh_shape)), choices):
            kind = _kind(layout, axis, target)
            if kind is not None and mesh_shape[axis] > 1:
                end = index[(*layout[:axis], target, *layout[axis + 1 :])]
                found.append((row, end, axis, KINDS.index(kind), shard_dim(target) or 0))
    columns = np.array(found, dtype=np.intp).reshape(-1, 5).T
    return Transitions(mesh_shape, layouts, *columns)


def _kind(layout: Layout, axis: int, target: Placement) -> str | None:
    """The name of the step from `layout` to `target` on one axis; None if it is no valid step.

    Chunks of one dim nest from outer to inner axes, so that only the innermost of a dim's axes may change.
    """
    source = layout[axis]
    inner_dims = {shard_dim(placement) for placement in layout[axis + 1 :]} - {None}
    if source == target or {shard_dim(source), shard_dim(target)} & inner_dims or is_partial(target):
        return None
    if is_partial(source):
        return "all_reduce" if target == REPLICATE else "reduce_scatter" if source == Partial() else None
    if source == REPLICATE:
        return "slice"
    return "all_gather" if target == REPLICATE else "all_to_all"


@dataclass(frozen=True, eq=False)  # `_paths` makes one for each tensor, so identity is equality
class Paths:
    """All shortest paths between the layouts of one tensor: steps are entries (before, after) of the matrices."""

    transitions: Transitions
    step_bytes: npt.NDArray[np.int64]  # per transition
    copied_bytes: npt.NDArray[np.int64]  # per transition
    number: npt.NDArray[np.intp]  # [layout, layout] -> transition, or -1
    distance: npt.NDArray[np.float64]
    previous: npt.NDArray[np.int32]  # [start, end] -> the layout before the end

    @property
    def index(self) -> dict[Layout, int]:
        return self.transitions.index

    def step(self, before: int, after: int) -> Step:
        number = self.number[before, after]
        axis, kind = int(self.transitions.axis[number]), KINDS[self.transitions.kind[number]]
        source, target = self.transitions.layouts[before][axis], self.transitions.layouts[after][axis]
        collective = None if kind == "slice" else kind
        return Step(axis, source, target, collective, int(self.step_bytes[number]), int(self.copied_bytes[number]))

    @cached_property
    def _kinds_of_step(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """The different (kind, bytes, axis, copied bytes) among the transitions, and which of them each one is."""
        columns = [self.transitions.kind, self.step_bytes, self.transitions.axis, self.copied_bytes]
        keys = np.stack(columns, axis=1)
        different, which = np.unique(keys, axis=0, return_inverse=True)
        return different, which.reshape(-1)

    def prices(self, price: Price) -> tuple[float, ...]:
        """The prices of the different steps."""
        different = self._kinds_of_step[0]
        return tuple(
            price(KINDS[kind], bytes_, axis) + (price("copy", copied, axis) if copied else 0.0)
            for kind, bytes_, axis, copied in different.tolist()
        )

    def collective_prices(self, price: Price) -> tuple[float, ...]:
        """The prices of the different steps, without what they copy."""
        different = self._kinds_of_step[0]
        return tuple(price(KINDS[kind], bytes_, axis) for kind, bytes_, axis, _ in different.tolist())

    def end_steps(
        self, prices: tuple[float, ...], end_of_path: End
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """Kind and seconds of the last (or first) step of every path, [start, end]; -1 and 0 where there is none."""
        step_seconds = np.array(prices, dtype=np.float64)[self._kinds_of_step[1]]
        kinds = np.full(self.distance.shape, -1, dtype=np.intp)
        seconds = np.zeros(self.distance.shape)
        start, end = np.nonzero(np.isfinite(self.distance) & ~np.eye(len(self.distance), dtype=bool))
        after = end
        while start.size:
            before = self.previous[start, after]
            done = np.full(before.shape, end_of_path == "last") | (before == start)
            numbers = self.number[before[done], after[done]]
            kinds[start[done], end[done]] = self.transitions.kind[numbers]
            seconds[start[done], end[done]] = step_seconds[numbers]
            start, end, after = start[~done], end[~done], before[~done]
        return kinds, seconds

    def seconds(self, prices: tuple[float, ...]) -> npt.NDArray[np.float64]:
        """Sums of the steps' prices along every path, [start, end]."""
        step_seconds = np.array(prices, dtype=np.float64)[self._kinds_of_step[1]]
        total = np.where(np.isfinite(self.distance), 0.0, np.inf)
        start, end = np.nonzero(np.isfinite(self.distance))
        after = end
        while True:
            unfinished = after != start
            start, end, after = start[unfinished], end[unfinished], after[unfinished]
            if not start.size:
                return total
            before = self.previous[start, after]
            total[start, end] += step_seconds[self.number[before, after]]
            after = before


@lru_cache(maxsize=1024)
def _paths(shape: tuple[int, ...], itemsize: int, mesh_shape: tuple[int, ...], reduction: str) -> Paths:
    steps = _transitions(len(shape), mesh_shape, reduction)
    step_bytes = _step_bytes(steps, shape) * itemsize
    copied_bytes = _copies(steps, shape) * step_bytes
    ranks = np.array(mesh_shape, dtype=np.float64)[steps.axis]
    weight = OUTER_AXIS_WEIGHT ** (len(mesh_shape) - 1 - steps.axis)
    kind = np.array(KINDS)[steps.kind]
    sent = step_bytes * (ranks - 1) / ranks * np.where(kind == "all_reduce", 2, 1)
    cost = np.where(kind == "slice", 1 + COPY_WEIGHT * step_bytes / ranks, weight * (LATENCY_BYTES + sent))
    count = len(steps.layouts)
    number = np.full((count, count), -1, dtype=np.intp)
    number[steps.start, steps.end] = np.arange(len(cost))
    graph = csr_matrix((cost, (steps.start, steps.end)), shape=(count, count))
    distance, previous = dijkstra(graph, return_predecessors=True)
    return Paths(steps, step_bytes, copied_bytes.astype(np.int64), number, distance, previous)


def _step_bytes(steps: Transitions, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Elements of each step's full tensor over its group, as `Step.bytes` counts them."""
    sizes = steps.local_sizes(shape)
    counts = sizes.prod(axis=1, dtype=np.int64)
    ranks = np.array(steps.mesh_shape, dtype=np.int64)[steps.axis]
    before, after = counts[steps.start], counts[steps.end]
    kept = sizes[steps.start]  # of an all_to_all: the shard before it, with the newly cut dim padded
    padded = kept.copy()
    rows = np.arange(len(kept))
    if kept.shape[1]:
        padded[rows, steps.dim] = sizes[steps.end, steps.dim] * ranks
    exchanged = padded.prod(axis=1, dtype=np.int64)
    return np.choose(steps.kind, [before, before * ranks, before, after * ranks, exchanged])


def _copies(steps: Transitions, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """How often each step copies its bytes, as `passes.moves` emits it.

    Chunks along a dim other than the first are laid out anew on the side where the dim is whole; a dim that its ranks
    do not divide is padded before, and cut out after where it is not the first. all_reduce copies its input. A slice is
    a copy itself.
    """
    sizes = steps.local_sizes(shape)
    ranks = np.array(steps.mesh_shape, dtype=np.int64)[steps.axis]
    source, target = (_dims_on_axis(steps, ends) for ends in (steps.start, steps.end))
    gathered, scattered = source >= 0, target >= 0
    rows = np.arange(len(steps.axis))
    whole_after = sizes[steps.end, np.maximum(source, 0)] if shape else np.ones(len(rows))
    whole_before = sizes[steps.start, np.maximum(target, 0)] if shape else np.ones(len(rows))
    uneven_source, uneven_target = whole_after % ranks != 0, whole_before % ranks != 0
    joined = (source > 0) * (1.0 + uneven_source) + (gathered & uneven_source) / ranks
    split = (target > 0) * (1.0 + uneven_target / ranks) + (scattered & uneven_target)
    exchanged = (
        (source > 0) * (1.0 + uneven_source) + (target > 0) * (1.0 + uneven_target) + uneven_source + uneven_target
    )
    reduced = np.ones(len(rows))
    return np.choose(steps.kind, [np.zeros(len(rows)), joined, reduced, split, exchanged])


def _dims_on_axis(steps: Transitions, ends: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """The dim that each step's axis cuts in these layouts; -1 for none."""
    dims = np.array([[-1 if (dim := shard_dim(item)) is None else dim for item in layout] for layout in steps.layouts])
    return dims[ends, steps.axis] if len(ends) else np.zeros(0, dtype=np.intp)
