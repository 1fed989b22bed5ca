"""The backward's readers of what the forward has: told to read another value, or views of it that are taken anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from autopar.capture.program import Program
from autopar.passes.local_call import GraphBuilder
from autopar.passes.split_phases import backward_nodes
from autopar.passes.storages import view_base, view_root
from autopar.sharding.op_call import target_of


def late_behind(graph: fx.Graph, program: Program) -> set[fx.Node]:
    """The nodes of the backward, moved behind the forward, as they will run."""
    late = backward_nodes(graph, program)
    for node in [node for node in graph.nodes if node in late and node.op != "placeholder"]:
        graph.output_node().prepend(node)
    return late


def crossing(graph: fx.Graph, late: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """By value of its own: the nodes of the backward that read it, or views of it that the forward took."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node in late:
            for root in dict.fromkeys(view_root(source) for source in node.all_input_nodes if source not in late):
                found.setdefault(root, []).append(node)
    return found


def family(root: fx.Node) -> Iterator[fx.Node]:
    """A value, and the views of it, bases first."""
    waiting = [root]
    while waiting:
        node = waiting.pop(0)
        yield node
        waiting.extend(user for user in node.users if view_base(user) is node)


@dataclass
class LateReaders:
    """Redirects readers; `views` are those of the forward that may then have no reader left."""

    build: GraphBuilder
    late: set[fx.Node]
    views: dict[fx.Node, None] = field(default_factory=dict)

    def redirect(self, root: fx.Node, value: fx.Node, first: fx.Node) -> None:
        """Let the backward read `value` for `root`, and views of it that are taken anew before `first`."""
        copies, relatives = {root: value}, list(family(root))
        for source in [node for node in relatives if node not in self.late]:
            if source is not root:
                self.views[source] = None
            for reader in [user for user in source.users if user in self.late]:
                reader.replace_input_with(source, self._view(source, copies, first))
        for view in [node for node in relatives if node in self.late]:
            view.meta["val"] = self.build.value_of_call(view)  # it lies in the storage of the other value now

    def erase_unread_views(self) -> None:
        """Take away the views of the forward that nobody reads any more."""
        for node in reversed(list(self.views)):
            if not node.users:
                self.build.graph.erase_node(node)

    def _view(self, node: fx.Node, copies: dict[fx.Node, fx.Node], first: fx.Node) -> fx.Node:
        if node not in copies:
            base = view_base(node)
            assert base is not None
            source = self._view(base, copies, first)
            with self.build.graph.inserting_before(first):
                args, kwargs = fx.map_arg(node.args, lambda _: source), fx.map_arg(node.kwargs, lambda _: source)
                copies[node] = self.build.op(target_of(node), *args, **kwargs)
        return copies[node]
