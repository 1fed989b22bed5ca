"""Collectives issued early and waited for late, so that they run beside computation."""

from __future__ import annotations

import torch
from torch import fx

from autopar.passes.collectives import collective_kind, is_collective, is_wait
from autopar.passes.copy_graph import copy_graph
from autopar.passes.storages import view_root

_aten = torch.ops.aten
HEAVY_NAMES = frozenset({"mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward", "attention",
                         "attention_backward"})  # fmt: skip
"""Ops that take long enough to hide a collective behind."""


def schedule_collectives(gm: fx.GraphModule) -> fx.GraphModule:
    """Start each collective early and wait for it late, within its phase.

    Invariant: only the order of nodes changes, and among collectives not even that; it depends on ops and edges, not on
    sizes, so that all ranks agree.
    Memory: what makes more bytes than it takes (all_gather) starts at most one heavy op ahead of its place, and so does
    the wait of what keeps its input alive (all but all_reduce) end at most one heavy op behind: one gathered parameter
    and one unscattered gradient beyond what the unscheduled graph holds.
    """
    gm = copy_graph(gm)
    collectives = [node for node in gm.graph.nodes if is_collective(node)]
    for node in collectives:
        _start_early(node)
    runs = _Runs(gm.graph)
    for node in reversed(collectives):
        _wait_late(node, runs)
    return gm


def _start_early(collective: fx.Node) -> None:
    """Move a collective, with what packs its input, up to where its input is made."""
    moved = _with_packing(collective)
    first = min(moved)
    barriers = {source for node in moved for source in node.all_input_nodes if source not in moved}
    place, heavy_ops = first, 0
    limit = 1 if collective_kind(collective) == "all_gather" else None
    while _may_pass(place.prev, collective, barriers):
        heavy_ops += is_heavy(place.prev)
        place = place.prev
        if heavy_ops == limit:
            break
    else:
        if limit is not None and heavy_ops == 0 and not barriers & {place.prev}:
            return  # the start of the phase: nothing to hide behind
    if place is not first:
        for node in sorted(moved):
            place.prepend(node)


def _may_pass(node: fx.Node, collective: fx.Node, barriers: set[fx.Node]) -> bool:
    """Whether a collective may be issued before `node`: not before its input, its phase, or another collective."""
    same_phase = node.meta.get("phase") == collective.meta.get("phase")
    return node.op == "call_function" and same_phase and node not in barriers and not is_collective(node)


def _with_packing(collective: fx.Node) -> set[fx.Node]:
    """A collective, the ops of the same move that pad and pack its input, and the views of inputs below it."""
    found, waiting = {collective}, list(collective.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if _packs(node, collective) or _is_view_of_input(node, collective):
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _packs(node: fx.Node, collective: fx.Node) -> bool:
    own = node.op == "call_function" and node.meta.get("move") == collective.meta.get("move") is not None
    return own and not is_wait(node) and len(node.users) == 1


def _is_view_of_input(node: fx.Node, collective: fx.Node) -> bool:
    same_phase = node.meta.get("phase") == collective.meta.get("phase")
    return same_phase and node.op == "call_function" and view_root(node).op == "placeholder"


class _Runs:
    """The longest runs of ops of one phase, by number, with their last ops: what a wait may be moved along."""

    def __init__(self, graph: fx.Graph) -> None:
        self.number: dict[fx.Node, int] = {}
        self.last: list[fx.Node] = []
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            before = self.number.get(node.prev)
            if before is not None and node.prev.meta.get("phase") == node.meta.get("phase"):
                self.number[node], self.last[before] = before, node
            else:
                self.number[node] = len(self.last)
                self.last.append(node)

    def end(self, wait: fx.Node) -> fx.Node:
        """The op before the first reader of `wait` in its run, or else the last of the run."""
        own = self.number[wait]
        readers = [user for user in wait.users if self.number.get(user) == own]
        return min(readers).prev if readers else self.last[own]

    def move(self, wait: fx.Node, place: fx.Node) -> None:
        """Put `wait` right behind `place`."""
        place.append(wait)
        if self.last[self.number[wait]] is place:
            self.last[self.number[wait]] = wait


def _wait_late(collective: fx.Node, runs: _Runs) -> None:
    """Move a wait down to the first reader of its result."""
    wait = next((user for user in collective.users if is_wait(user)), None)
    if wait is None:
        return
    place = end = runs.end(wait)
    if collective_kind(collective) != "all_reduce":
        place = wait
        while place is not end:
            place = place.next
            if is_heavy(place):
                break
    if place is not wait:
        runs.move(wait, place)


def is_heavy(node: fx.Node) -> bool:
    """Whether an op takes long enough to hide a transfer behind."""
    packet = getattr(node.target, "overloadpacket", None)
    return getattr(packet, "__name__", "") in HEAVY_NAMES
