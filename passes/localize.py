"""From full shapes to the shapes of one rank's shards."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from autopar.errors import RuleError
from autopar.fake_calls import FakeCalls
from autopar.passes.local_call import GraphBuilder, LocalCall, LocalValue, RankGeometry
from autopar.passes.local_forms import local_form_of
from autopar.passes.moves import local_move, move
from autopar.sharding.assignment import RECOMPUTES, VALUE_OF, Assignment, is_getitem
from autopar.sharding.layout import parse_layout
from autopar.sharding.op_call import call_of
from autopar.torch_compat import LazyGraphModule

REPLACED_META = ("val", "tensor_meta")  # what describes the full value


def localize(
    gm: fx.GraphModule, assignment: Assignment, geometry: RankGeometry, fake_calls: FakeCalls | None = None
) -> fx.GraphModule:
    """Rebuild the graph for the rank of `geometry`, on the shards that `assignment` gives it.

    Ranks share much when they share `fake_calls` (of the mode of the graph's fake values).
    Requires: the layouts of both ends of every edge agree (`insert_moves`), every node has its full fake value.
    Ensures: every node has the fake value of its shard; the ranks' results recombine to those of `gm`.
    """
    localizer = Localizer(assignment, GraphBuilder(fx.Graph(), fake_calls or FakeCalls(fake_mode_of(gm)), geometry))
    for node in gm.graph.nodes:
        localizer.add(node)
    return LazyGraphModule(gm, localizer.build.graph)


def _value_of(node: fx.Node) -> tuple[str, int]:
    """The key of the op whose value a node of the traced graph is, and which of its outputs."""
    producer, index = (node.args[0], node.args[1]) if is_getitem(node) else (node, 0)
    assert isinstance(producer, fx.Node) and isinstance(index, int)
    return producer.meta.get("key", producer.name), index


def fake_mode_of(gm: fx.GraphModule) -> FakeTensorMode:
    """The mode of the graph's fake values; a new one where there are none."""
    for node in gm.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if isinstance(mode, FakeTensorMode):
            return mode
    return FakeTensorMode()


@dataclass
class Localizer:
    """The new graph under construction, and what became of each node of the old one."""

    assignment: Assignment
    build: GraphBuilder
    values: dict[fx.Node, LocalValue | None] = field(default_factory=dict)

    def add(self, node: fx.Node) -> None:
        """Append the local counterpart of `node`."""
        meta = {key: item for key, item in node.meta.items() if key not in REPLACED_META}
        self.build.meta = {**meta, "pass": "localize"}
        self.values[node] = value = getattr(self, f"_{node.op}")(node)
        if isinstance(value, fx.Node) and node.op == "call_function" and node.target is not move:
            value.meta.setdefault(VALUE_OF, _value_of(node))

    def _placeholder(self, node: fx.Node) -> fx.Node:
        value: torch.Tensor = node.meta["val"]
        layout = self.assignment.layout_of(node)
        shape = self.build.geometry.chunk(value.shape, layout)[1]
        new = self.build.graph.placeholder(node.name)
        new.meta.update({**self.build.meta, "layout": layout})
        new.meta["val"] = self.build.fake_calls.empty(shape, value.dtype, torch.device(self.build.geometry.device))
        return new

    def _get_attr(self, node: fx.Node) -> fx.Node:
        new = self.build.graph.get_attr(str(node.target))
        new.meta.update({**self.build.meta, "val": node.meta.get("val")})
        return new

    def _output(self, node: fx.Node) -> None:
        self.build.graph.output(self._local(node.args[0])).meta.update(self.build.meta)

    def _call_function(self, node: fx.Node) -> LocalValue | None:
        if is_getitem(node):
            return self._getitem(node)
        if node.target is move:
            return self._move(node)
        local = LocalCall(
            self.build,
            call_of(node),
            self.assignment.strategy_of(node),
            self._local(node.args),
            self._local(node.kwargs),
            self._keeps(node),
        )
        form = local_form_of(local.call.target)
        if form is not None:
            return form(local)
        self._refuse_unknown_forms(local)
        return local.plain()

    def _keeps(self, node: fx.Node) -> str:
        """The name of the layer of experts whose forward and backward share what this node makes or reads."""
        pairs, name = self.assignment.kept_experts, node.meta.get(RECOMPUTES, node.name)
        return pairs.get(name) or (name if name in pairs.values() else "")

    def _getitem(self, node: fx.Node) -> LocalValue | None:
        producer, index = node.args
        assert isinstance(producer, fx.Node) and isinstance(index, int)
        value = self.values[producer]
        if isinstance(value, tuple):
            return value[index]
        return self.build.op(operator.getitem, value, index)

    def _move(self, node: fx.Node) -> fx.Node:
        tensor, source, target = node.args
        assert isinstance(tensor, fx.Node) and isinstance(source, str) and isinstance(target, str)
        axes = len(self.build.geometry.mesh_shape)
        shape = tuple(tensor.meta["val"].shape)
        return local_move(
            self.build, self._local(tensor), shape, parse_layout(source, axes), parse_layout(target, axes)
        )

    def _local(self, value: Any) -> Any:
        """Arguments of the old graph as arguments of the new one."""
        if isinstance(value, fx.Node):
            return self.values[value]
        if isinstance(value, torch.device):
            return torch.device(self.build.geometry.device)
        if isinstance(value, (tuple, list)):
            return type(value)(self._local(item) for item in value)
        if isinstance(value, dict):
            return {key: self._local(item) for key, item in value.items()}
        return value

    @staticmethod
    def _refuse_unknown_forms(local: LocalCall) -> None:
        unknown = {rule.form for rule in local.strategy.rules} - {""}
        if unknown:
            raise RuleError(f"{local.call.name} has no local form, but its rules ask for {sorted(unknown)}")
