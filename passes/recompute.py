"""Recomputation: what the plan does not keep is computed again in the backward, right before it is read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import fx

from autopar.capture.program import Program
from autopar.passes.copy_graph import copy_graph
from autopar.passes.split_phases import backward_nodes
from autopar.sharding.assignment import RECOMPUTES, is_getitem

SUFFIX = "_recomputed"


def recompute(gm: fx.GraphModule, program: Program, names: Collection[str]) -> fx.GraphModule:
    """Copy the ops called `names` into the backward, for its readers; `names` outside of the forward do nothing.

    A copy stands right before its first reader, and so do, before it, the copies of those of its inputs that are to be
    recomputed too: chains of any length. Inputs that are not in `names` are read as they are, which saves them. An op
    that only the backward reads leaves the forward.

    Invariant: every value is what it was. A copy takes the arguments of the original, a random op its seed and its
    place, so it draws the same numbers; the new value of a mutated buffer is taken from the original alone.
    Ensures: a copy has the metadata of its original, but the backward's phase, and names it under `RECOMPUTES`.
    """
    if not names:
        return gm
    gm = copy_graph(gm)
    late = backward_nodes(gm.graph, program)
    copier = _Copier(late, frozenset(names))
    for node in list(gm.graph.nodes):
        if node in late and node.op == "call_function":
            copier.redirect(node, before=node)
    for node in reversed(list(gm.graph.nodes)):
        if (node.name in names or is_getitem(node)) and node not in late and not node.users:
            gm.graph.erase_node(node)
    return gm


@dataclass
class _Copier:
    late: set[fx.Node]
    names: frozenset[str]
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def redirect(self, reader: fx.Node, before: fx.Node) -> None:
        """Let a node of the backward read copies where its inputs are recomputed."""
        for source in reader.all_input_nodes:
            if source not in self.late and _op_of(source).name in self.names:
                reader.replace_input_with(source, self._copy(source, before))

    def _copy(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The copy of a node, made before `before` when it is first asked for; its chain comes with it.

        The chain is walked with a stack of its own: it may be longer than Python's.
        """
        waiting = [node]
        while waiting:
            top = waiting[-1]
            lacking = [
                source for source in top.all_input_nodes if self._is_copied(source) and source not in self.copies
            ]
            if top not in self.copies and not lacking:
                self._make(top, before)
            if top in self.copies:
                waiting.pop()
            else:
                waiting.extend(lacking)
        return self.copies[node]

    def _is_copied(self, node: fx.Node) -> bool:
        return node.op == "call_function" and _op_of(node).name in self.names

    def _make(self, node: fx.Node, before: fx.Node) -> None:
        graph = node.graph
        with graph.inserting_before(before):
            copy = graph.create_node(
                "call_function",
                node.target,
                fx.map_arg(node.args, lambda source: self.copies.get(source, source)),
                fx.map_arg(node.kwargs, lambda source: self.copies.get(source, source)),
                name=f"{node.name}{SUFFIX}",
            )
        copy.meta.update({**node.meta, "phase": "backward", RECOMPUTES: node.name, "pass": "recompute"})
        self.copies[node] = copy
        self.late.add(copy)


def _op_of(node: fx.Node) -> fx.Node:
    """The op whose value, or one of whose values, a node is."""
    while is_getitem(node):
        (node,) = node.all_input_nodes
    return node
