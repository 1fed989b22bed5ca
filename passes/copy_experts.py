"""Copies of experts: a layer gets the weights of all experts that it computes, their owners get the gradients."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.fake_calls import FakeCalls
from autopar.passes.boxed import boxed
from autopar.passes.copy_graph import copy_graph
from autopar.passes.expert_places import ExpertPlaces, Hop, routes_of
from autopar.passes.local_call import GraphBuilder, RankGeometry
from autopar.passes.localize import fake_mode_of
from autopar.passes.pipeline import LocalProgram
from autopar.passes.renumber_experts import EXPERT_LAYER, LAYERS, constant, inherited, is_copied, renumber_experts
from autopar.sharding.rules.experts import WEIGHTS

ops = torch.ops.autopar
EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default
FIRST_GRADIENT = 2  # of a weight, among the results of a backward: after those of the tokens and of their scores
WANTED = 11  # the argument of a backward that says which gradients there are


def with_places(local: LocalProgram, places: Mapping[str, ExpertPlaces]) -> LocalProgram:
    """A rank's graphs, with the experts of the layers of `places`, by path, where they are."""

    def placed(gm: fx.GraphModule) -> fx.GraphModule:
        return copy_experts(renumber_experts(gm, places, local.geometry), places, local.geometry)

    if not places:
        return local
    backward = None if local.backward is None else placed(local.backward)
    return replace(local, forward=placed(local.forward), backward=backward)


def copy_experts(gm: fx.GraphModule, places: Mapping[str, ExpertPlaces], geometry: RankGeometry) -> fx.GraphModule:
    """Send each group of ranks, before each op of a layer of `places` with copies, the weights that it computes with.

    They go by all-to-all and die with the op: a backward fetches them anew. Its gradients of them go back the same way,
    and their owners add them up. Requires: a boxed graph in local shapes, whose numbers of experts are those of slots
    (`renumber_experts`). Invariant: the values of all else, up to the order of sums.
    """
    copy = copy_graph(gm)
    copier = _Copier(copy, GraphBuilder(copy.graph, FakeCalls(fake_mode_of(gm)), geometry))
    for node in list(copy.graph.nodes):
        layer = node.meta.get(EXPERT_LAYER)
        where = None if layer is None else places.get(layer.layer)
        if where is not None and node.target in LAYERS and is_copied(layer, where):
            copier.copy(node, where)
    return boxed(copy, copy.graph)


class _Copier:
    def __init__(self, gm: fx.GraphModule, build: GraphBuilder) -> None:
        self.gm, self.build = gm, build

    def copy(self, node: fx.Node, places: ExpertPlaces) -> None:
        """Let one op of a layer, forward or backward, compute the experts of its group's slots."""
        geometry, begin = self.build.geometry, LAYERS[node.target]
        here = tuple(geometry.coordinates[axis] for axis in places.axes)
        hops = routes_of(places, geometry.mesh_shape).hops[here]
        self.build.meta = inherited(node) | {"pass": "copy_experts"}
        with self.gm.graph.inserting_before(node):
            rows = [self._held(f"expert_rows_{axis}_of_{node.name}", hop, node) for axis, hop in enumerate(hops)]
            for argument in (begin + weight for weight in WEIGHTS):
                weight = node.args[argument]
                if isinstance(weight, fx.Node):
                    node.update_arg(argument, self._fetched(weight, hops, rows))
        if begin:
            node.meta["val"] = self.build.value_of_call(node)
            self._return(node, hops, rows, len(places.owned[0]))

    def _held(self, name: str, hop: Hop, reader: fx.Node) -> fx.Node:
        rows = torch.tensor(hop.rows, dtype=torch.int64, device=self.build.geometry.device)
        held = constant(self.gm, name, rows, reader)
        held.meta["val"] = self.build.fake_calls.empty(tuple(rows.shape), rows.dtype, rows.device)
        return held

    def _fetched(self, weight: fx.Node, hops: tuple[Hop, ...], rows: list[fx.Node]) -> fx.Node:
        """The rows of all experts of the group's slots, in the order in which they arrive."""
        for hop, held in zip(hops, rows, strict=True):
            sent = self.build.op(torch.ops.aten.index_select.default, weight, 0, held)
            weight = self._exchange(sent, hop.axis, hop.coming, hop.sent)
        return weight

    def _return(self, node: fx.Node, hops: tuple[Hop, ...], rows: list[fx.Node], owned: int) -> None:
        """Bring a backward's gradients of weights to the rows of their owners, which add them up."""
        wanted: Any = node.args[WANTED]
        for result in [user for user in node.users if user.target is operator.getitem]:
            number: Any = result.args[1]
            result.meta["val"] = node.meta["val"][number]
            if number >= FIRST_GRADIENT and wanted[number]:
                readers = list(result.users)
                with self.gm.graph.inserting_before(result.next):
                    total = self._added_up(result, hops, rows, owned)
                for reader in readers:
                    reader.replace_input_with(result, total)

    def _added_up(self, gradient: fx.Node, hops: tuple[Hop, ...], rows: list[fx.Node], owned: int) -> fx.Node:
        counts = [owned, *(sum(hop.coming) for hop in hops[:-1])]  # of the rows that each hop began with
        for hop, held, count in reversed(list(zip(hops, rows, counts, strict=True))):
            back = self._exchange(gradient, hop.axis, hop.sent, hop.coming)
            gradient = self.build.op(ops.sum_copies.default, back, held, list(hop.sent), count)
        return gradient

    def _exchange(self, node: fx.Node, axis: int, coming: tuple[int, ...], sent: tuple[int, ...]) -> fx.Node:
        shape = (sum(coming), *node.meta["val"].shape[1:])
        group = self.build.geometry.group_names[axis]
        return self.build.collective(EXCHANGE, node, shape, list(coming), list(sent), group)
