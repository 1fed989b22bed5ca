"""What passes promise, checked on the graphs that they made. A failure is a mistake of ours, not of the user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from autopar.capture.program import OutputKind, results_of
from autopar.passes.collectives import is_collective, is_wait
from autopar.passes.copies import is_copy, is_copy_wait
from autopar.passes.moves import move
from autopar.passes.pack_saved import PACKS, owner
from autopar.passes.split_phases import backward_nodes
from autopar.passes.storages import view_root
from autopar.sharding.assignment import Assignment, is_getitem
from autopar.sharding.layout import Layout, format_layout, parse_layout
from autopar.sharding.op_call import walk
from autopar.sharding.reshard import effective_layout

if TYPE_CHECKING:
    from autopar.passes.pipeline import Emission


def check_moves_agree(gm: fx.GraphModule, job: Emission) -> None:
    """No edge disagrees with the assignment: every reader gets the layouts that its strategy demands."""
    assignment = job.assignment
    for node in gm.graph.nodes:
        if node.op != "call_function" or is_getitem(node) or node.target is move:
            continue
        values = [leaf for leaf in walk((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]
        for value, wanted in zip(values, assignment.strategy_of(node).inputs, strict=True):
            has, needs = (effective_layout(it, assignment.mesh_shape) for it in (_layout(value, assignment), wanted))
            assert has == needs, f"{value.name} -> {node.name}: {format_layout(has)} is not {format_layout(needs)}"


def _layout(node: fx.Node, assignment: Assignment) -> Layout:
    if node.target is move:
        return parse_layout(str(node.args[2]), len(assignment.mesh_shape))
    return assignment.layout_of(node)


def check_recomputed(gm: fx.GraphModule, job: Emission) -> None:
    """Nothing of the backward reads what is recomputed from the forward."""
    late = backward_nodes(gm.graph, job.program)
    for node in late:
        sources = [source for source in node.all_input_nodes if source not in late]
        kept = [source.name for source in sources if source.name in job.assignment.recomputed]
        assert not kept or is_getitem(node), f"{node.name} reads {kept}, which the plan does not keep"


def check_packed(gm: fx.GraphModule, job: Emission) -> None:
    """The backward reads no packed value from the forward, but in its packed form."""
    late = backward_nodes(gm.graph, job.program) if job.assignment.packed else set()
    for node in late:
        for source in node.all_input_nodes:
            if source not in late and PACKS not in source.meta and source.op == "call_function":
                assert owner(view_root(source)) not in job.assignment.packed, f"{node.name} reads {source.name}, packed"


def check_hosted(gm: fx.GraphModule, job: Emission) -> None:
    """What lies on the host is read by copies to the device alone, and its gradient leaves as a copy on the host,
    unless it stays."""
    hosted = job.assignment.hosted
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node.name in hosted:
            readers = [user.name for user in node.users if not (is_copy(user) or is_copy_wait(user))]
            assert not readers, f"{node.name} is on the host, and {readers} read it"
    names = {item.name: item.node in job.assignment.staying for item in job.program.inputs if item.node in hosted}
    for output, node in zip(job.program.outputs, results_of(gm.graph), strict=True):
        if output.kind is OutputKind.GRADIENT and output.name in names and node is not None:
            stays = not is_copy_wait(node)
            assert stays == names[output.name], f"{output.name}: whether its gradient leaves to the host"


def check_values(gm: fx.GraphModule, job: Emission) -> None:
    """Every node has the fake value of its shard, and no move is left."""
    for node in gm.graph.nodes:
        assert node.op in ("output", "get_attr") or "val" in node.meta, f"{node.name} has no value"
        assert node.target is not move, f"{node.name} was not emitted"


def check_waits(gm: fx.GraphModule, job: Emission) -> None:
    """A collective's result is read by its wait alone."""
    for node in gm.graph.nodes:
        if is_collective(node):
            readers = [user.name for user in node.users if not is_wait(user)]
            assert not readers, f"{node.name} is read by {readers} before it is complete"
