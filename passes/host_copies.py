"""Where copies to the host and back start in an emitted graph, and where they are waited for."""

from __future__ import annotations

from torch import fx

from autopar.passes.copies import WAIT_COPY
from autopar.passes.local_call import GraphBuilder
from autopar.passes.schedule_collectives import is_heavy

HEAVY_OPS = 4  # that a copy to the host or back may run beside: about a layer of a transformer
INHERITED_META = ("stack_trace", "where", "nn_module_stack", "module")


def waited(build: GraphBuilder, copy: fx.Node, source: fx.Node) -> fx.Node:
    """Wait until a copy of `source` is complete."""
    node = build.graph.call_function(WAIT_COPY, (copy, source))
    node.meta.update(build.meta)
    node.meta["val"] = copy.meta["val"]
    return node


def behind(place: fx.Node, late: set[fx.Node]) -> fx.Node:
    """The op of the phase of `place` that is `HEAVY_OPS` heavy ops behind it, or the last."""
    heavy, is_late = 0, place in late
    while heavy < HEAVY_OPS and place.next.op != "output" and (place.next in late) == is_late:
        place = place.next
        heavy += is_heavy(place)
    return place


def ahead(place: fx.Node, late: set[fx.Node]) -> fx.Node:
    """The op of the phase of `place` that is `HEAVY_OPS` heavy ops ahead of it, or the first."""
    heavy, is_late = 0, place in late
    while heavy < HEAVY_OPS and (place.prev in late) == is_late and place.prev.op == "call_function":
        place = place.prev
        heavy += is_heavy(place)
    return place
