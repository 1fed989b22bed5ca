"""Moves on the edges whose two ends disagree about the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autopar.capture.program import results_of
from autopar.passes.copy_graph import copy_graph
from autopar.passes.moves import move
from autopar.passes.storages import view_base, view_root
from autopar.sharding.assignment import OWN_STRATEGY, Assignment, is_getitem
from autopar.sharding.layout import REPLICATE, Layout, format_layout, replicated
from autopar.sharding.reshard import effective_layout, moves_once
from autopar.sharding.rule import Rule
from autopar.sharding.strategies import Strategy

INHERITED_META = ("stack_trace", "where", "nn_module_stack", "module", "phase")


def insert_moves(gm: fx.GraphModule, assignment: Assignment) -> fx.GraphModule:
    """Insert a `move` on every edge whose reader needs another layout than its producer makes.

    Invariant: each value keeps its meaning; only where it lives changes.
    Ensures: no edge disagrees with `assignment`, graph outputs included. Readers of one phase that need the same layout
    share one move, right before the first of them. A value that both phases gather is gathered in both; what the
    forward has summed, cut or exchanged is saved so (`moves_once`), unless it is an input of the program; a parameter
    that is `gathered_once` is saved as the forward has gathered it.
    """
    gm = copy_graph(gm)
    inserter = _Inserter(assignment)
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and not is_getitem(node):
            inserter.move_inputs(node)
        elif node.op == "output":
            inserter.move_results(node)
    return gm


@dataclass
class _Inserter:
    assignment: Assignment
    moves: dict[tuple[fx.Node, Layout, str], fx.Node] = field(default_factory=dict)

    def move_inputs(self, reader: fx.Node) -> None:
        """Give one op every tensor in the layout that its strategy demands."""
        wanted = iter(self.assignment.strategy_of(reader).inputs)

        def moved(value: fx.Node) -> fx.Node:
            return self._carry(value, next(wanted), reader, before=reader)

        reader.args, reader.kwargs = _map_nodes(reader.args, moved), _map_nodes(reader.kwargs, moved)

    def move_results(self, output: fx.Node) -> None:
        """Give the graph every result in the layout in which it leaves; a result moves as soon as it exists."""
        wanted = iter(self.assignment.outputs)
        elements = []
        for value in results_of(output.graph):
            layout = next(wanted)
            if layout is not None and isinstance(value, fx.Node):
                value = self._carry(value, layout, value, before=_after(value))
            elements.append(value)
        output.args = (tuple(elements),)

    def _carry(self, value: fx.Node, target: Layout, reader: fx.Node, *, before: fx.Node) -> fx.Node:
        source = self.assignment.layout_of(value)
        mesh_shape = self.assignment.mesh_shape
        if effective_layout(source, mesh_shape) == effective_layout(target, mesh_shape):
            return value
        goal = effective_layout(target, mesh_shape)
        early = self.moves.get((value, goal, "forward"))
        if early is not None and view_root(value).op != "placeholder" and moves_once(source, target, mesh_shape):
            return early
        gathered = self._as_gathered(value, goal, reader, before)
        if gathered is not None:
            return gathered
        key = (value, goal, reader.meta.get("phase", "forward"))
        if key not in self.moves:
            with value.graph.inserting_before(before):
                node = value.graph.call_function(move, (value, format_layout(source), format_layout(target)))
            node.meta.update({name: reader.meta[name] for name in INHERITED_META if name in reader.meta})
            node.meta.update({"val": value.meta["val"], "pass": "insert_moves", "move": node.name})
            self.moves[key] = node
        return self.moves[key]

    def _as_gathered(self, value: fx.Node, goal: Layout, reader: fx.Node, before: fx.Node) -> fx.Node | None:
        """A parameter, or views of it, as views of the copy that the forward has gathered; None where there is none."""
        is_late = reader.meta.get("phase") == "backward"
        if not is_late or goal != replicated(len(goal)) or view_root(value).name not in self.assignment.gathered_once:
            return None
        views: list[fx.Node] = []
        while (value, goal, "forward") not in self.moves:
            base = view_base(value)
            if base is None or is_getitem(value):
                return None
            views.append(value)
            value = base
            while value.target is move:  # of the view's own input: the copy is whole, whatever layout the view had
                (value,) = value.all_input_nodes
        node = self.moves[value, goal, "forward"]
        whole = Strategy((Rule((REPLICATE,), (REPLICATE,)),) * len(goal))
        for view in reversed(views):
            with view.graph.inserting_before(before):
                node = view.graph.create_node("call_function", view.target, *_with_source(view, node))
            node.meta.update(view.meta)
            node.meta.update({OWN_STRATEGY: whole, "phase": "backward", "pass": "insert_moves"})
            self.moves[view, goal, "backward"] = node
        return node


def _with_source(view: fx.Node, source: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a view, of another value."""
    return _map_nodes(view.args, lambda _: source), _map_nodes(view.kwargs, lambda _: source)


def _after(node: fx.Node) -> fx.Node:
    """The first place where a reader of `node` may stand: placeholders stay together."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following


def _map_nodes(value: Any, function: Callable[[fx.Node], fx.Node]) -> Any:
    """`value` with `function` applied to every node, in the order in which `OpCall.inputs` counts tensors."""
    if isinstance(value, fx.Node):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_map_nodes(item, function) for item in value)
    if isinstance(value, dict):
        return {name: _map_nodes(item, function) for name, item in value.items()}
    return value


def moves_of(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """The moves of a graph, in order."""
    return (node for node in gm.graph.nodes if node.target is move)
