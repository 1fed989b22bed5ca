"""Parameters that live on the host: copied to the device for each phase that reads them, their gradients sent back."""

from __future__ import annotations

from collections.abc import Iterable, Set

from torch import fx

from autopar.capture.program import OutputKind, Program, results_of
from autopar.fake_calls import FakeCalls
from autopar.passes.collectives import is_wait
from autopar.passes.copies import OFFLOAD, RELOAD
from autopar.passes.copy_graph import copy_graph
from autopar.passes.host_copies import INHERITED_META, ahead, behind, waited
from autopar.passes.late_readers import LateReaders, crossing, family, late_behind
from autopar.passes.local_call import GraphBuilder, RankGeometry
from autopar.sharding.assignment import Assignment

ON_HOST = "on_host"
"""Under this key of its metadata a placeholder says that its value lies on the host."""


def host_parameters(
    gm: fx.GraphModule, program: Program, assignment: Assignment, geometry: RankGeometry, fake_calls: FakeCalls
) -> fx.GraphModule:
    """Let the parameters that are `hosted` be given on the host, and their gradients leave to it, but those staying.

    Invariant: every value is what it was, and the order of all other ops of a phase but waits. Ensures: what is
    `hosted` is read by copies to the device alone, one in each phase that reads it; a view of it is taken of that copy.
    Memory: a copy to the device starts at most `HEAVY_OPS` heavy ops ahead of its first reader, where it is waited for;
    a gradient's sum over the ranks is waited for at most as many behind its start, and its copy to the host, which
    frees it, at most as many behind that.
    """
    gm, hosted = copy_graph(gm), assignment.hosted
    if not hosted:
        return gm
    late = late_behind(gm.graph, program)
    host = _Host(GraphBuilder(gm.graph, fake_calls, geometry), late)
    across = crossing(gm.graph, late)
    own = [node for node in gm.graph.nodes if node.op == "placeholder" and node.name in hosted]
    for node in own:
        node.meta[ON_HOST] = True
    for node in sorted((node for node in own if node in across), key=lambda node: min(across[node]), reverse=True):
        host.bring_late(node, across[node])
    for node, readers in sorted(host.early(own).items(), key=lambda item: min(item[1]), reverse=True):
        host.bring_early(node, readers)
    host.send(program, {item.name for item in program.inputs if item.node in hosted - assignment.staying})
    return gm


class _Host:
    """Copies are put in from the last one needed to the first, so that they queue in the order of need."""

    def __init__(self, build: GraphBuilder, late: set[fx.Node]) -> None:
        self.build, self.late = build, late

    def bring_late(self, parameter: fx.Node, readers: list[fx.Node]) -> None:
        """A copy for the backward, and views of it."""
        first = min(readers)
        value = self._reloaded(parameter, first, "backward")
        late_readers = LateReaders(self.build, self.late)
        late_readers.redirect(parameter, value, first)
        self.late |= {value, value.all_input_nodes[0]}
        late_readers.erase_unread_views()

    def early(self, parameters: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        """What else reads each of some parameters, if anything does: ops of the forward, and what is returned."""
        found = {node: [user for user in node.users if user not in self.late] for node in parameters}
        return {node: readers for node, readers in found.items() if readers}

    def bring_early(self, parameter: fx.Node, readers: list[fx.Node]) -> None:
        """A copy for the forward, and for what it returns."""
        views = [node for node in family(parameter) if node is not parameter and node not in self.late]
        first = min([reader for reader in readers if reader.op != "output"], default=self._last_early().next)
        value = self._reloaded(parameter, first, "forward")
        for reader in readers:
            reader.replace_input_with(parameter, value)
        for view in views:
            view.meta["val"] = self.build.value_of_call(view)  # it lies in the storage of the copy now

    def _reloaded(self, parameter: fx.Node, first: fx.Node, phase: str) -> fx.Node:
        """The parameter on the device, before `first`."""
        meta = {name: first.meta[name] for name in INHERITED_META if name in first.meta}
        self.build.meta = {**meta, "phase": phase, "pass": "host_parameters"}
        start = ahead(first, self.late)
        while start.prev.target is RELOAD:
            start = start.prev
        with self.build.graph.inserting_before(start):
            copy = self.build.op(RELOAD, parameter, parameter.meta["val"].device)
        with self.build.graph.inserting_before(first):
            return waited(self.build, copy, parameter)

    def send(self, program: Program, names: Set[str]) -> None:
        """Gradients of the parameters called `names` leave to the host."""
        results = list(results_of(self.build.graph))
        for number, (output, node) in enumerate(zip(program.outputs, results, strict=True)):
            if output.kind is OutputKind.GRADIENT and output.name in names and node is not None:
                results[number] = self._sent(node)
        self.build.graph.output_node().args = (tuple(results),)

    def _sent(self, gradient: fx.Node) -> fx.Node:
        meta = {name: gradient.meta[name] for name in INHERITED_META if name in gradient.meta}
        self.build.meta = {**meta, "phase": "backward", "pass": "host_parameters"}
        made = gradient if gradient in self.late and gradient.op == "call_function" else self._last_early()
        if is_wait(gradient):  # a sum over the ranks may have been left to the end of the phase
            place = behind(gradient.all_input_nodes[0], self.late)
            if place < gradient:
                place.append(gradient)
        with self.build.graph.inserting_before(made.next):
            copy = self.build.op(OFFLOAD, gradient)
        self.late.add(copy)
        with self.build.graph.inserting_before(behind(copy, self.late).next):
            value = waited(self.build, copy, gradient)
        self.late.add(value)
        return value

    def _last_early(self) -> fx.Node:
        """The last node before the backward: what is made there may be sent at once."""
        node = self.build.graph.output_node().prev
        while node in self.late and node.op != "placeholder":
            node = node.prev
        return node
