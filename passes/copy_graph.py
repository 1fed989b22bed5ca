"""A copy of a graph, for a pass to change."""

from __future__ import annotations

from torch import fx

from autopar.torch_compat import LazyGraphModule


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A new graph module with the nodes of `gm`, under the same names and with the same (shared) metadata values.

    Parameters and submodules are those of `gm`. Nodes are copied, so that the caller's graph stays as it was. Like all
    graph modules that passes make, it generates its Python code when it is first called or printed.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    renamed = [f"{old.name} -> {new.name}" for old, new in copies.items() if old.name != new.name]
    assert not renamed, f"a copied graph must keep its names, for plans speak of nodes by name: {renamed}"
    return LazyGraphModule(gm, graph)
