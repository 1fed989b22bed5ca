"""The bench on which a local form is written: graph, local values, and where this rank stands."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.fake_calls import FakeCalls
from autopar.passes.collectives import WAIT
from autopar.sharding.layout import Layout, local_chunk
from autopar.sharding.op_call import OpCall, target_of
from autopar.sharding.strategies import Strategy
from autopar.torch_compat import set_arguments

WORK_SHARE = "work_share"  # in a node's meta: the part of the rows given to it on which an op works, as is expected


@dataclass(frozen=True, slots=True)
class RankGeometry:
    """Where an emitted program runs: the mesh, this rank's coordinates in it, its process groups."""

    mesh_shape: tuple[int, ...]
    coordinates: tuple[int, ...]
    group_names: tuple[str, ...]  # of the group along each mesh axis that holds this rank
    device: str

    def chunk(self, shape: Sequence[int], layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offsets, lengths) of this rank's shard of a tensor of `shape`."""
        return local_chunk(shape, layout, self.mesh_shape, self.coordinates)


class GraphBuilder:
    """Appends ops to a graph and keeps the fake local value of each in `node.meta["val"]`."""

    def __init__(self, graph: fx.Graph, fake_calls: FakeCalls, geometry: RankGeometry) -> None:
        self.graph, self.fake_calls, self.geometry = graph, fake_calls, geometry
        self.meta: dict[str, Any] = {}  # what new nodes inherit: stack_trace, module path, phase, pass name
        self.kept: dict[str, Any] = {}  # what a local form left for another, by the name of its op

    def op(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A call of `target` on nodes and constants, named after the op."""
        name = target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else None
        node = self.graph.create_node("call_function", target, (), {}, name)  # faster than with the arguments
        set_arguments(node, args, kwargs)
        node.meta.update(self.meta)
        node.meta["val"] = self.value_of_call(node)
        return node

    def value_of_call(self, node: fx.Node) -> Any:
        """The fake value of a call from those of its arguments."""
        args, kwargs = map_arg(node.args, value_of), map_arg(node.kwargs, value_of)
        return self.fake_calls(target_of(node), args, kwargs)

    def all_reduce(self, node: fx.Node, axis: int, reduce_op: str = "sum") -> fx.Node:
        """All-reduce over one mesh axis, waited for."""
        if self.geometry.mesh_shape[axis] == 1:
            return node
        target = torch.ops._c10d_functional.all_reduce.default
        return self.collective(target, node, node.meta["val"].shape, reduce_op, self.geometry.group_names[axis])

    def collective(self, target: torch._ops.OpOverload, node: fx.Node, shape: Sequence[int], *args: Any) -> fx.Node:
        """A collective that makes a contiguous tensor of `shape`, waited for."""
        started = self.graph.create_node("call_function", target, (node, *args), {}, target.overloadpacket.__name__)
        started.meta.update(self.meta)
        value = value_of(node)
        started.meta["val"] = self.fake_calls.empty(tuple(shape), value.dtype, value.device)
        return self.wait(started)

    def wait(self, node: fx.Node) -> fx.Node:
        """A wait returns the tensor that it is given, once that is complete: both have one fake value."""
        waited = self.graph.create_node("call_function", WAIT, (node,), {}, "wait_tensor")
        waited.meta.update(self.meta)
        waited.meta["val"] = node.meta["val"]
        return waited


def value_of(node: fx.Node) -> Any:
    """The fake value of a node."""
    return node.meta["val"]


@dataclass(frozen=True)
class LocalCall:
    """One op to be emitted in local shapes. `args` and `kwargs` hold nodes of the new graph, already in the layouts
    that `strategy` demands; sizes among them are still those of the full tensors. `keeps`: under which name the call
    is to leave, or to find, what a forward and its backward share."""

    build: GraphBuilder
    call: OpCall  # the full shapes
    strategy: Strategy
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keeps: str = ""

    @property
    def geometry(self) -> RankGeometry:
        return self.build.geometry

    def input_chunk(self, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offsets, lengths) of this rank's shard of tensor input `index`."""
        return self.geometry.chunk(self.call.inputs[index].shape, self.strategy.inputs[index])

    def output_chunk(self, index: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offsets, lengths) of this rank's shard of tensor output `index`."""
        spec = self.call.outputs[index]
        assert spec is not None
        return self.geometry.chunk(spec.shape, self.strategy.outputs[index])

    def axes_with(self, form: str) -> tuple[int, ...]:
        return self.strategy.axes_with(form)

    def plain(self) -> fx.Node:
        """The op itself, on the shards."""
        return self.build.op(self.call.target, *self.args, **self.kwargs)

    def output(self, node: fx.Node, index: int) -> fx.Node:
        """One output of a call that returns several."""
        return self.build.op(operator.getitem, node, index)


LocalValue = fx.Node | tuple[fx.Node | None, ...]  # a node, or one per output
LocalForm = Callable[[LocalCall], LocalValue]
