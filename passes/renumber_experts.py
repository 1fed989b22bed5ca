"""Experts that stand in other slots than their numbers say: the layers read the numbers of slots instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from autopar.passes.boxed import boxed
from autopar.passes.copy_graph import copy_graph

READS_ROUTING = "reads_routing"  # in the meta of every node by which a layer of experts reads its routing

INHERITED = ("stack_trace", "where", "module", "phase", "key")


@dataclass(frozen=True, slots=True)
class ReadsRouting:
    """`layer`: the path of the module. `index`: the name of the node with the numbers of the chosen experts."""

    layer: str
    index: str


def renumber_experts(gm: fx.GraphModule, slots: Mapping[str, Tensor]) -> fx.GraphModule:
    """Let the layers of `slots` find each expert in its slot: int64 [experts] by path of the layer.

    Requires: a boxed graph in local shapes. Invariant: if the weights of expert e lie in row slots[e], every value is
    what it was with expert e in row e. The tensors of `slots` are read at each call: written to, they take effect.
    """
    copy = copy_graph(gm)
    named = {node.name: node for node in copy.graph.nodes}
    numbered: dict[ReadsRouting, fx.Node] = {}
    for node in list(copy.graph.nodes):
        reads = node.meta.get(READS_ROUTING)
        if reads is None or reads.layer not in slots:
            continue
        index = named[reads.index]
        if reads not in numbered:
            numbered[reads] = _slots_of(copy, index, slots[reads.layer], node)
        node.replace_input_with(index, numbered[reads])
    return boxed(copy, copy.graph)


def _slots_of(gm: fx.GraphModule, index: fx.Node, slots: Tensor, reader: fx.Node) -> fx.Node:
    """A node before `reader`: the slots of the experts that `index` names."""
    name = f"expert_slots_of_{reader.name}"
    gm.register_buffer(name, slots, persistent=False)
    meta = {key: item for key, item in reader.meta.items() if key in INHERITED} | {"pass": "renumber_experts"}
    with gm.graph.inserting_before(reader):
        held = gm.graph.get_attr(name)
        found = gm.graph.call_function(torch.ops.autopar.expert_slots.default, (index, held))
    held.meta.update(meta)
    found.meta.update(meta | {"val": index.meta["val"]})
    return found
