"""The backward graph cut in two: gradients that other stages wait for, and gradients of weights, which can wait."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.capture.program import OutputKind, Program, results_of
from autopar.passes.boxed import boxed
from autopar.passes.copy_graph import graph_of

SEVERAL = 2


@dataclass(frozen=True)
class SplitBackward:
    """`of_inputs` takes what the backward takes, and returns the gradients that go to other stages, then what
    `of_weights` takes; that returns the other gradients. `urgent`: the numbers of the gradients of the first kind."""

    of_inputs: fx.GraphModule
    of_weights: fx.GraphModule
    urgent: tuple[int, ...]
    kept: tuple[str, ...]  # what `of_weights` takes, by node name


def split_weights(gm: fx.GraphModule, program: Program) -> SplitBackward:
    """Cut a backward graph of a pipeline stage.

    The first part computes what the gradients for other stages need, and what leads to the gradients of several
    weights; each op that serves the gradient of one weight alone is in the second.
    Invariant: together they compute what the backward graph computes.
    """
    outputs = results_of(gm.graph)
    gradients = [output for output in program.outputs if output.kind is OutputKind.GRADIENT]
    urgent = tuple(index for index, output in enumerate(gradients) if output.is_between_stages)
    nodes = [node for node in gm.graph.nodes if node.op != "output"]
    early = _early(nodes, outputs, urgent)
    inputs = [node for node in nodes if node.op == "placeholder"]
    late = [node for node in nodes if node not in early and node.op != "placeholder"]
    others = [outputs[index] for index in range(len(outputs)) if index not in urgent]
    kept = _read(late, others, set(late))
    first = [node for node in nodes if node in early and node.op != "placeholder"]
    of_inputs = graph_of(inputs, first, [*(outputs[index] for index in urgent), *kept])
    of_weights = graph_of(kept, late, others)
    names = tuple(node.name for node in kept)
    return SplitBackward(boxed(gm, of_inputs), boxed(gm, of_weights), urgent, names)


def _early(nodes: Sequence[fx.Node], outputs: Sequence[fx.Node | None], urgent: Sequence[int]) -> set[fx.Node]:
    """Ancestors of urgent outputs, and what several others share."""
    serves: dict[fx.Node, set[int]] = {node: set() for node in nodes}
    for index, node in enumerate(outputs):
        if node is not None:
            serves[node].add(-1 if index in urgent else index)
    for node in reversed(nodes):
        for user in node.users:
            if user in serves:
                serves[node] |= serves[user]
    early = {node for node, served in serves.items() if -1 in served or len(served) >= SEVERAL}
    for node in nodes:  # one of several outputs goes with the op that has them
        if node.target is operator.getitem:
            (early.add if node.all_input_nodes[0] in early else early.discard)(node)
    return early


def _read(nodes: Iterable[fx.Node], results: Iterable[fx.Node | None], inside: set[fx.Node]) -> list[fx.Node]:
    """What the nodes and results read of outside, in the order of the graph."""
    found = {source for node in nodes for source in node.all_input_nodes if source not in inside}
    found |= {node for node in results if node is not None and node not in inside}
    return sorted(found)
