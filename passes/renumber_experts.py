"""Experts that stand in other places than their numbers say: the layers read the numbers of places instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.passes.boxed import boxed
from autopar.passes.copy_graph import copy_graph
from autopar.passes.expert_places import ExpertPlaces, routes_of, row_table, slot_table, slots_per_group
from autopar.passes.local_call import RankGeometry
from autopar.passes.observed import EXPERT_COUNT
from autopar.sharding.rules.experts import DOWN_BIAS

EXPERT_LAYER = "expert_layer"  # in the meta of every node that a layer of experts became

INHERITED = ("stack_trace", "where", "module", "phase", "key")
FIRST = DOWN_BIAS + 2  # the argument after the activation: which number this rank's first expert has
ops = torch.ops.autopar
LAYERS: dict[Any, int] = {  # each op that computes experts, and where its arguments of the layer begin
    ops.experts.default: 0,
    ops.experts_keeping.default: 0,
    ops.experts_backward.default: 1,
    ops.experts_backward_kept.default: 1,
}


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """`layer`: the path of the module. `index`: the name of the node with the numbers of the chosen experts. `tokens`
    and `experts`: the mesh axes whose ranks have other tokens, and other experts."""

    layer: str
    index: str
    tokens: tuple[int, ...]
    experts: tuple[int, ...]


def renumber_experts(gm: fx.GraphModule, places: Mapping[str, ExpertPlaces], geometry: RankGeometry) -> fx.GraphModule:
    """Let the layers of `places`, by path, find each expert where it stands.

    Where a layer has copies (and its groups stand along the axes that the op knows) that is one of the expert's slots,
    so that its tokens are shared out evenly, else its row. Requires: a boxed graph in local shapes. Invariant: if the
    weights lie so, every value is what it was with expert e in row e.
    """
    copy = copy_graph(gm)
    named = {node.name: node for node in copy.graph.nodes}
    numbered: dict[ExpertLayer, fx.Node] = {}
    for node in list(copy.graph.nodes):
        layer: ExpertLayer | None = node.meta.get(EXPERT_LAYER)
        if layer is None or layer.layer not in places or EXPERT_COUNT in node.meta:
            continue
        where, index = places[layer.layer], named[layer.index]
        if index in node.all_input_nodes:
            if layer not in numbered:
                numbered[layer] = _places_of(copy, node, where, geometry)
            node.replace_input_with(index, numbered[layer])
        if is_copied(layer, where):
            _count_slots(node, slots_per_group(where), len(where.owned[0]))
    return boxed(copy, copy.graph)


def is_copied(layer: ExpertLayer, places: ExpertPlaces) -> bool:
    """Whether an op of a layer computes copies: those for other groups than its own are out of its reach."""
    return places.has_copies and layer.experts == places.axes


def _places_of(gm: fx.GraphModule, reader: fx.Node, places: ExpertPlaces, geometry: RankGeometry) -> fx.Node:
    """A node before `reader`: where the experts that its layer's index names are."""
    layer: ExpertLayer = reader.meta[EXPERT_LAYER]
    table, start = row_table(places), 0
    if is_copied(layer, places):
        table = slot_table(places, routes_of(places, geometry.mesh_shape))
        for axis in layer.tokens:  # ranks begin with other slots, those with the same tokens with the same
            start = start * geometry.mesh_shape[axis] + geometry.coordinates[axis]
    index = next(node for node in gm.graph.nodes if node.name == layer.index)
    with gm.graph.inserting_before(reader):
        held = constant(gm, f"expert_places_of_{reader.name}", table.to(geometry.device), reader)
        found = gm.graph.call_function(ops.expert_places.default, (index, held, start))
    found.meta.update(held.meta | {"val": index.meta["val"]})
    return found


def constant(gm: fx.GraphModule, name: str, value: Tensor, reader: fx.Node) -> fx.Node:
    """A node, where the graph inserts, with a tensor that `reader` needs."""
    gm.register_buffer(name, value, persistent=False)
    held = gm.graph.get_attr(name)
    held.meta.update(inherited(reader))
    return held


def inherited(node: fx.Node) -> dict[str, Any]:
    """The meta of what is put in for a node."""
    return {key: item for key, item in node.meta.items() if key in INHERITED} | {"pass": "renumber_experts"}


def _count_slots(node: fx.Node, slots: int, rows: int) -> None:
    """Let an op's numbers of experts, which count in whole groups, count slots instead of rows."""

    def counted(number: Any) -> int:
        return int(number) // rows * slots

    if node.target == ops.expert_ranks.default:
        index, starts, ends = node.args
        assert isinstance(starts, (list, tuple)) and isinstance(ends, (list, tuple))
        node.args = (index, list(map(counted, starts)), list(map(counted, ends)))
    elif node.target in LAYERS:
        place = FIRST + LAYERS[node.target]
        node.update_arg(place, counted(node.args[place]))
