"""Saved values in other forms between the phases: packed after their last reader in the forward, and unpacked before
their first in the backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.capture.program import Program
from autopar.fake_calls import FakeCalls
from autopar.passes.collectives import is_collective, is_wait
from autopar.passes.copy_graph import copy_graph
from autopar.passes.host_copies import INHERITED_META, ahead, behind, waited
from autopar.passes.late_readers import LateReaders, crossing, family, late_behind
from autopar.passes.local_call import GraphBuilder, RankGeometry
from autopar.passes.packings import FORM_NAMED, Form, Nodes
from autopar.sharding.assignment import VALUE_OF

PACKS = "packs"
"""Under this key of its metadata a node that packs or unpacks names the value that it does so with."""
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
    late = late_behind(gm.graph, program)
    build = GraphBuilder(gm.graph, fake_calls, geometry)
    packer = _Packer(build, late, LateReaders(build, late))
    for root, readers in crossing(gm.graph, late).items():
        form = packed.get(owner(root)) if root.op == "call_function" else None
        if form is not None:
            packer.pack(root, readers, FORM_NAMED[form])
    packer.readers.erase_unread_views()
    return gm


def owner(node: fx.Node) -> tuple[str, int]:
    """The op, by key, whose value a local node holds, itself or moved, and which of its outputs that is."""
    while VALUE_OF not in node.meta and ("move" in node.meta or is_wait(node) or is_collective(node)):
        node = node.all_input_nodes[0]
    found: tuple[str, int] = node.meta.get(VALUE_OF, ("", 0))
    return found


@dataclass
class _Packer:
    build: GraphBuilder
    late: set[fx.Node]
    readers: LateReaders

    def pack(self, root: fx.Node, readers: list[fx.Node], form: Form) -> None:
        early = [node for node in family(root) if node not in self.late]
        last = max([root, *(user for node in early for user in node.users if user not in self.late)])
        first = min(readers)
        meta = {name: root.meta[name] for name in INHERITED_META if name in root.meta}
        meta |= {PACKS: root.name, "pass": "pack_saved"}
        self.build.meta = {**meta, "phase": "forward"}
        packed = self._offload(root, last, form) if form.on_host else self._inserted(last, form, root)
        self.build.meta = {**meta, "phase": "backward"}
        start = ahead(first, self.late) if form.on_host else first
        with self.build.graph.inserting_before(start):
            value = form.unpack(self.build, packed, root.meta["val"])
        if form.on_host:
            with self.build.graph.inserting_before(first):
                value = waited(self.build, value, packed[0])
        self.readers.redirect(root, value, first)

    def _inserted(self, place: fx.Node, form: Form, root: fx.Node) -> Nodes:
        with self.build.graph.inserting_before(place.next):
            return form.pack(self.build, root)

    def _offload(self, root: fx.Node, last: fx.Node, form: Form) -> Nodes:
        with self.build.graph.inserting_before(root.next):
            (copy,) = form.pack(self.build, root)
        place = max(behind(last, self.late), copy)
        with self.build.graph.inserting_before(place.next):
            return (waited(self.build, copy, root),)
