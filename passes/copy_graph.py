"""A copy of a graph, or of a part of it, for a pass to change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx
from torch.fx.node import map_arg

from autopar.torch_compat import LazyGraphModule, set_arguments


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A new graph module with the nodes of `gm`, under the same names and with the same (shared) metadata values.

    Parameters and submodules are those of `gm`. Nodes are copied, so that the caller's graph stays as it was. Like all
    graph modules that passes make, it generates its Python code when it is first called or printed.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        copies[node] = copy_node(graph, node, copies)
    renamed = [f"{old.name} -> {new.name}" for old, new in copies.items() if old.name != new.name]
    assert not renamed, f"a copied graph must keep its names, for plans speak of nodes by name: {renamed}"
    return LazyGraphModule(gm, graph)


def copy_node(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """`graph.node_copy`, without its search of every argument for symbolic sizes: there are none, and it takes long."""
    copy = graph.create_node(node.op, node.target, (), {}, node.name, node.type)
    set_arguments(copy, map_arg(node.args, copies.__getitem__), map_arg(node.kwargs, copies.__getitem__))
    copy.meta.update(node.meta)
    return copy


def graph_of(inputs: Iterable[fx.Node], nodes: Iterable[fx.Node], outputs: Iterable[fx.Node | None]) -> fx.Graph:
    """A graph with placeholders for `inputs`, copies of `nodes`, and a flat tuple of `outputs`."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta.update(node.meta)
    for node in nodes:
        copies[node] = copy_node(graph, node, copies)
    graph.output(tuple(None if node is None else copies[node] for node in outputs))
    return graph


def with_ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and all that they are computed from."""
    found, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found
