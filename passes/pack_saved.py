"""Saved values in other forms between the phases: packed after their last reader in the forward, and unpacked before
their first in the backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.capture.program import Program
from autopar.fake_calls import FakeCalls
from autopar.passes.collectives import is_collective, is_wait
from autopar.passes.copies import WAIT_COPY
from autopar.passes.copy_graph import copy_graph
from autopar.passes.local_call import GraphBuilder, RankGeometry
from autopar.passes.packings import FORM_NAMED, Form, Nodes
from autopar.passes.schedule_collectives import is_heavy
from autopar.passes.split_phases import backward_nodes
from autopar.passes.storages import view_base, view_root
from autopar.sharding.assignment import VALUE_OF
from autopar.sharding.op_call import target_of

HEAVY_OPS = 4  # that a copy to the host or back may run beside: about a layer of a transformer
PACKS = "packs"
"""Under this key of its metadata a node that packs or unpacks names the value that it does so with."""
INHERITED_META = ("stack_trace", "where", "nn_module_stack", "module")
Packed = Mapping[tuple[str, int], str]
"""By the key of an op and which of its outputs: the name of a form."""


def pack_saved(
    gm: fx.GraphModule, program: Program, packed: Packed, geometry: RankGeometry, fake_calls: FakeCalls
) -> fx.GraphModule:
    """Hold the values of `packed` that the backward reads, as the forward has moved them, in other forms.

    Invariant: the order of all other ops of a phase, and what the forward reads. What is unpacked is what was packed,
    but for what the form's error allows. Requires: local values that say which op's they are (`VALUE_OF`).
    Ensures: the backward reads of a packed value the packed form alone; a view of it is taken again.
    Memory: the copy to the host of a value is waited for, and the value freed, at most `HEAVY_OPS` heavy ops behind its
    last reader in the forward; it comes back at most as many ahead of its first in the backward.
    """
    gm = copy_graph(gm)
    if not packed:
        return gm
    late = backward_nodes(gm.graph, program)
    for node in [node for node in gm.graph.nodes if node in late and node.op != "placeholder"]:
        gm.graph.output_node().prepend(node)  # behind the forward, as they will run
    packer = _Packer(GraphBuilder(gm.graph, fake_calls, geometry), late)
    for root, readers in _crossing(gm.graph, late).items():
        form = packed.get(owner(root)) if root.op == "call_function" else None
        if form is not None:
            packer.pack(root, readers, FORM_NAMED[form])
    for node in reversed(list(packer.views)):
        if not node.users:
            gm.graph.erase_node(node)
    return gm


def owner(node: fx.Node) -> tuple[str, int]:
    """The op, by key, whose value a local node holds, itself or moved, and which of its outputs that is."""
    while VALUE_OF not in node.meta and ("move" in node.meta or is_wait(node) or is_collective(node)):
        node = node.all_input_nodes[0]
    found: tuple[str, int] = node.meta.get(VALUE_OF, ("", 0))
    return found


def _crossing(graph: fx.Graph, late: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """By value of its own: the nodes of the backward that read it, or views of it that the forward took."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node in late:
            for root in dict.fromkeys(view_root(source) for source in node.all_input_nodes if source not in late):
                found.setdefault(root, []).append(node)
    return found


@dataclass
class _Packer:
    build: GraphBuilder
    late: set[fx.Node]
    views: dict[fx.Node, None] = field(default_factory=dict)  # of packed values, that the forward took

    def pack(self, root: fx.Node, readers: list[fx.Node], form: Form) -> None:
        early = [node for node in _family(root) if node not in self.late]
        last = max([root, *(user for node in early for user in node.users if user not in self.late)])
        first = min(readers)
        meta = {name: root.meta[name] for name in INHERITED_META if name in root.meta}
        meta |= {PACKS: root.name, "pass": "pack_saved"}
        self.build.meta = {**meta, "phase": "forward"}
        packed = self._offload(root, last, form) if form.on_host else self._inserted(last, form, root)
        self.build.meta = {**meta, "phase": "backward"}
        start = _ahead(first, self.late) if form.on_host else first
        with self.build.graph.inserting_before(start):
            value = form.unpack(self.build, packed, root.meta["val"])
        if form.on_host:
            with self.build.graph.inserting_before(first):
                value = self._waited(value, packed[0])
        self._redirect(root, value, first)

    def _inserted(self, place: fx.Node, form: Form, root: fx.Node) -> Nodes:
        with self.build.graph.inserting_before(place.next):
            return form.pack(self.build, root)

    def _offload(self, root: fx.Node, last: fx.Node, form: Form) -> Nodes:
        with self.build.graph.inserting_before(root.next):
            (copy,) = form.pack(self.build, root)
        place = max(_behind(last, self.late), copy)
        with self.build.graph.inserting_before(place.next):
            return (self._waited(copy, root),)

    def _waited(self, copy: fx.Node, source: fx.Node) -> fx.Node:
        waited = self.build.graph.call_function(WAIT_COPY, (copy, source))
        waited.meta.update(self.build.meta)
        waited.meta["val"] = copy.meta["val"]
        return waited

    def _redirect(self, root: fx.Node, value: fx.Node, first: fx.Node) -> None:
        """Let the backward read the unpacked value, and views of it that are taken anew."""
        copies, family = {root: value}, list(_family(root))
        for source in [node for node in family if node not in self.late]:
            if source is not root:
                self.views[source] = None
            for reader in [user for user in source.users if user in self.late]:
                reader.replace_input_with(source, self._view(source, copies, first))
        for view in [node for node in family if node in self.late]:
            view.meta["val"] = self.build.value_of_call(view)  # it lies in the storage of the unpacked value now

    def _view(self, node: fx.Node, copies: dict[fx.Node, fx.Node], first: fx.Node) -> fx.Node:
        if node not in copies:
            base = view_base(node)
            assert base is not None
            source = self._view(base, copies, first)
            with self.build.graph.inserting_before(first):
                args, kwargs = fx.map_arg(node.args, lambda _: source), fx.map_arg(node.kwargs, lambda _: source)
                copies[node] = self.build.op(target_of(node), *args, **kwargs)
        return copies[node]


def _family(root: fx.Node) -> Iterator[fx.Node]:
    """A value, and the views of it, bases first."""
    waiting = [root]
    while waiting:
        node = waiting.pop(0)
        yield node
        waiting.extend(user for user in node.users if view_base(user) is node)


def _behind(place: fx.Node, late: set[fx.Node]) -> fx.Node:
    """The op of the forward that is `HEAVY_OPS` heavy ops behind `place`, or its last."""
    heavy = 0
    while heavy < HEAVY_OPS and place.next.op != "output" and place.next not in late:
        place = place.next
        heavy += is_heavy(place)
    return place


def _ahead(place: fx.Node, late: set[fx.Node]) -> fx.Node:
    """The op of the backward that is `HEAVY_OPS` heavy ops ahead of `place`, or its first."""
    heavy = 0
    while heavy < HEAVY_OPS and place.prev in late and place.prev.op == "call_function":
        place = place.prev
        heavy += is_heavy(place)
    return place
