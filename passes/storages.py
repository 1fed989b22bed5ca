"""Which nodes of a graph share memory, by the storages of their fake values."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.passes.collectives import is_collective, is_wait
from autopar.sharding.op_call import walk


def storages_of(node: fx.Node) -> dict[int, int]:
    """The storages under a node's value: identity and bytes. Empty where the value holds no tensor."""
    found = {}
    for leaf in walk(node.meta.get("val")):
        if isinstance(leaf, torch.Tensor):
            storage = leaf.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def view_base(node: fx.Node) -> fx.Node | None:
    """The value of which `node` is a view that can be taken again from it alone; None if it is a value of its own."""
    if node.op != "call_function" or is_wait(node) or is_collective(node) or len(node.all_input_nodes) != 1:
        return None
    (source,) = node.all_input_nodes
    if node.target is operator.getitem:
        return source if view_base(source) is not None else None
    own, given = storages_of(node), storages_of(source)
    return source if own and own.keys() <= given.keys() else None


def view_root(node: fx.Node) -> fx.Node:
    """The value of its own under a chain of views; `node` itself if it is no view."""
    base = view_base(node)
    while base is not None:
        node, base = base, view_base(base)
    return node
