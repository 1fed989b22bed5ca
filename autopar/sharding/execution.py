"""Runs one op in one strategy on all ranks, in one process, and puts the full result together again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import count
from math import inf
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from autopar.fake_calls import FakeCalls
from autopar.passes.local_call import RankGeometry
from autopar.passes.localize import fake_mode_of, localize
from autopar.runtime.lockstep import run_lockstep
from autopar.runtime.virtual_groups import every_coordinates, virtual_group_names
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout import Layout, chunk, local_chunk, shard_dim
from autopar.sharding.op_call import OpCall, TensorSpec, call_of
from autopar.sharding.strategies import Strategy, compatible, mixes_partials, splits_divide

_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def trace_op(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    """A graph of one call: a placeholder per tensor, the op named `op`, its tensor outputs in a flat tuple."""
    graph = fx.Graph()
    mode = FakeTensorMode()
    numbers = count()

    def placeholder(tensor: torch.Tensor) -> fx.Node:
        node = graph.placeholder(f"tensor_{next(numbers)}")
        node.meta["val"] = mode.from_tensor(tensor)
        return node

    new_args, new_kwargs = pytree.tree_map_only(torch.Tensor, placeholder, (args, kwargs))
    node = graph.create_node("call_function", target, new_args, new_kwargs, "op")
    values = pytree.tree_map_only(fx.Node, lambda item: item.meta["val"], (new_args, new_kwargs))
    with mode:
        node.meta["val"] = target(*values[0], **values[1])
    graph.output(tuple(_outputs(graph, node)))
    return fx.GraphModule(torch.nn.Module(), graph)


def _outputs(graph: fx.Graph, node: fx.Node) -> list[fx.Node | None]:
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return [node]
    picked: list[fx.Node | None] = []
    for index, item in enumerate(value):
        output = graph.call_function(operator.getitem, (node, index)) if isinstance(item, torch.Tensor) else None
        if output is not None:
            output.meta["val"] = item
        picked.append(output)
    return picked


def call_in(gm: fx.GraphModule) -> OpCall:
    """The call of a graph made by `trace_op`."""
    return call_of(next(node for node in gm.graph.nodes if node.name == "op"))


def can_run(call: OpCall, strategy: Strategy, mesh_shape: tuple[int, ...]) -> bool:
    """Whether every rank has something to do, evenly where the rules demand it."""
    layouts = (*strategy.inputs, *strategy.outputs)
    even = any(rule.even for rule in strategy.rules)
    if not (splits_divide(strategy, mesh_shape) and compatible(strategy)) or any(map(mixes_partials, layouts)):
        return False
    for spec, layout in zip((*call.inputs, *call.outputs), layouts, strict=True):
        if spec is not None and not _fills(spec, layout, mesh_shape, even=even):
            return False
    return True


def _fills(spec: TensorSpec, layout: Layout, mesh_shape: tuple[int, ...], *, even: bool) -> bool:
    if any((shard_dim(placement) or 0) >= max(1, len(spec.shape)) for placement in layout):
        return False
    if not spec.shape and any(shard_dim(placement) is not None for placement in layout):
        return False
    shapes = {local_chunk(spec.shape, layout, mesh_shape, here)[1] for here in every_coordinates(mesh_shape)}
    return (len(shapes) == 1 or not even) and (0 in spec.shape or not any(0 in shape for shape in shapes))


def worst_error(actual: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]) -> float:
    """The largest difference, relative to the largest expected magnitude (at least 1); inf where shapes differ."""
    return max((_error(*pair) for pair in zip(actual, expected, strict=True)), default=0.0)


def _error(actual: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    if actual is None or expected is None:
        return 0.0
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return inf
    differ = ~((actual == expected) | ((actual != actual) & (expected != expected)))
    if not differ.any():
        return 0.0
    if not (expected.is_floating_point() or expected.is_complex()):
        return inf
    magnitude = expected[expected.isfinite()].abs()
    worst = (actual - expected).abs()[differ].nan_to_num(inf).max().item()
    return float(worst) / max(1.0, float(magnitude.max().item()) if magnitude.numel() else 1.0)


def run_sharded(
    gm: fx.GraphModule,
    strategy: Strategy,
    mesh_shape: tuple[int, ...],
    tensors: Sequence[torch.Tensor],
    fake_calls: FakeCalls | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """The full results of a graph of `trace_op` on `tensors`, computed in shards by all ranks of a mesh.

    `fake_calls`: of `fake_calls_of(gm)`; given again, it knows what other strategies of the graph have called.
    """
    fake_calls = fake_calls or fake_calls_of(gm)
    placeholders = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    layouts = dict(zip(placeholders, strategy.inputs, strict=True))
    assignment = Assignment(mesh_shape, {"op": strategy}, layouts, ())
    programs = [localize(gm, assignment, geometry, fake_calls) for geometry in virtual_geometries(mesh_shape)]
    shards = [distribute(tensor, layout, mesh_shape) for tensor, layout in zip(tensors, strategy.inputs, strict=True)]
    results = run_lockstep(programs, [list(rank) for rank in zip(*shards, strict=True)] or [[] for _ in programs])
    outputs = []
    for index, layout in enumerate(strategy.outputs):
        parts = [result[index] for result in results]
        outputs.append(None if parts[0] is None else recombine(parts, layout, mesh_shape))
    return tuple(outputs)


def fake_calls_of(gm: fx.GraphModule) -> FakeCalls:
    """Calls under the mode of a graph's fake values, for all strategies in which it is run."""
    return FakeCalls(fake_mode_of(gm))


def virtual_geometries(mesh_shape: tuple[int, ...]) -> list[RankGeometry]:
    """Where each rank of a virtual mesh stands, in rank order."""
    return [
        RankGeometry(mesh_shape, here, virtual_group_names(here, mesh_shape), "cpu")
        for here in every_coordinates(mesh_shape)
    ]


def distribute(tensor: torch.Tensor, layout: Layout, mesh_shape: Sequence[int]) -> list[torch.Tensor]:
    """What each rank, in row-major order, holds of `tensor`. Addends are random."""
    if not layout:
        return [tensor]
    if layout[0].is_replicate():
        return distribute(tensor, layout[1:], mesh_shape[1:]) * mesh_shape[0]
    cut = pieces(tensor, layout[0], mesh_shape[0])
    return [shard for piece in cut for shard in distribute(piece, layout[1:], mesh_shape[1:])]


def pieces(tensor: torch.Tensor, placement: Placement, ranks: int) -> list[torch.Tensor]:
    """What each rank of one axis holds of `tensor` where that is cut or a sum. Addends are random."""
    dim = shard_dim(placement)
    if dim is not None:
        spans = [chunk(tensor.shape[dim], ranks, coordinate) for coordinate in range(ranks)]
        return [tensor.narrow(dim, start, length).contiguous() for start, length in spans]
    return _addends(tensor, ranks)


def _addends(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    if tensor.is_floating_point():
        others = [torch.randn_like(tensor) for _ in range(ranks - 1)]
    else:
        others = [torch.randint_like(tensor, 0, 5) for _ in range(ranks - 1)]
    return [tensor - sum(others), *others]


def recombine(shards: Sequence[torch.Tensor], layout: Layout, mesh_shape: Sequence[int]) -> torch.Tensor:
    """The inverse of `distribute`; replicas that differ raise AssertionError."""
    if not layout:
        return shards[0]
    step = len(shards) // mesh_shape[0]
    rows = [shards[start : start + step] for start in range(0, len(shards), step)]
    joined = [recombine(row, layout[1:], mesh_shape[1:]) for row in rows]
    return _join(joined, layout[0])


def _join(parts: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor:
    dim = shard_dim(placement)
    if dim is not None:
        return torch.cat(list(parts), dim)
    if isinstance(placement, Partial):
        return reduce(_COMBINE[placement.reduce_op], parts)
    for part in parts[1:]:
        if not torch.equal(part, parts[0]):  # NaN is not equal to itself
            torch.testing.assert_close(part, parts[0], rtol=0, atol=0, equal_nan=True)
    return parts[0]
