"""The joint graph cut in two: forward, and backward from what the forward saved."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from autopar.capture.program import InputKind, OutputKind, Program, results_of
from autopar.passes.boxed import boxed
from autopar.passes.copy_graph import graph_of, with_ancestors
from autopar.passes.observed import observed
from autopar.passes.storages import view_base, view_root


def split_phases(gm: fx.GraphModule, program: Program) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """(forward, backward) graphs of a joint graph, both boxed; no backward where the program has no gradients.

    The forward takes every placeholder that is no tangent, in order, and returns the program's outputs that are no
    gradients, then counts of tokens by expert (`observed`), then the saved tensors. The backward takes the saved
    tensors, then the tangents, under their names in the joint graph, and returns the gradients.

    Invariant: together they compute what the joint graph computes, in its order. Ensures: a view of another saved value
    or of an input is not saved: its base is, and the backward takes the view again.
    """
    outputs = results_of(gm.graph)
    kinds = [output.kind for output in program.outputs]
    results = [node for node, kind in zip(outputs, kinds, strict=True) if kind is not OutputKind.GRADIENT]
    gradients = [node for node, kind in zip(outputs, kinds, strict=True) if kind is OutputKind.GRADIENT]
    backward = backward_nodes(gm.graph, program)
    tangents = [node for node in gm.graph.nodes if node.op == "placeholder" and node in backward]
    saved, replayed = _saved(gm.graph, backward, gradients) if gradients else ([], [])
    early = [node for node in gm.graph.nodes if node.op != "output" and node not in backward]
    forward_graph = graph_of([], early, [*results, *observed(early), *saved])
    if not gradients:
        return boxed(gm, forward_graph), None
    late = [node for node in gm.graph.nodes if node in backward and node not in tangents]
    backward_graph = graph_of([*saved, *tangents], [*replayed, *late], gradients)
    return boxed(gm, forward_graph), boxed(gm, backward_graph)


def backward_nodes(graph: fx.Graph, program: Program) -> set[fx.Node]:
    """The tangents, and the nodes of the backward phase that no result of the forward needs."""
    pairs = zip(results_of(graph), program.outputs, strict=True)
    results = [node for node, output in pairs if output.kind is not OutputKind.GRADIENT]
    tangents = {item.node for item in program.inputs if item.kind is InputKind.TANGENT}
    needed = with_ancestors(node for node in results if node is not None)
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            late = node.name in tangents
        elif node.target is operator.getitem:  # goes with the op whose output it names
            late = node.args[0] in found
        else:
            late = node.op == "call_function" and node.meta.get("phase") == "backward" and node not in needed
        if late:
            found.add(node)
    return found


def _saved(
    graph: fx.Graph, backward: set[fx.Node], gradients: Sequence[fx.Node | None]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """(tensors to save, views to take again in the backward), both in the order of the graph."""
    read = {source for node in backward for source in node.all_input_nodes if source not in backward}
    read |= {node for node in gradients if node is not None and node not in backward}
    sharing: dict[fx.Node, int] = {}
    for node in read:
        root = view_root(node)
        sharing[root] = sharing.get(root, 0) + 1
    saved, replayed = set[fx.Node](), set[fx.Node]()
    for node in read:
        root = view_root(node)
        if root.op != "placeholder" and sharing[root] == 1:
            saved.add(node)
            continue
        saved.add(root)
        while node is not root:
            replayed.add(node)
            base = view_base(node)
            assert base is not None
            node = base
    order = [node for node in graph.nodes if node in saved or node in replayed]
    return [node for node in order if node in saved], [node for node in order if node in replayed]
