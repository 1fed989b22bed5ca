"""The last sums of gradients over the ranks taken out of a backward graph, to be made once for all microbatches."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.capture.program import OutputKind, Program, results_of
from autopar.passes.boxed import boxed
from autopar.passes.collectives import collective_kind, is_collective, is_wait
from autopar.passes.copy_graph import graph_of


@dataclass(frozen=True)
class DeferredReductions:
    """`of_microbatch` takes what the backward takes, and returns what it returns, but for the gradients of these
    numbers each rank's own part of the sum; `of_step` takes those parts, added up, and returns the gradients."""

    of_microbatch: fx.GraphModule
    of_step: fx.GraphModule
    numbers: tuple[int, ...]


def defer_reductions(gm: fx.GraphModule, program: Program) -> DeferredReductions | None:
    """Cut a backward graph before the all-reduces with which gradients of parameters end; None where none does.

    Invariant: sums over ranks and sums over microbatches may be taken in either order. A gradient that is scattered, or
    widened after its sum, stays as it is: its parts would take more memory, or be added up in fewer bits.
    """
    results, tails = list(results_of(gm.graph)), last_sums(gm, program)
    numbers = tuple(sorted(tails))
    if not numbers:
        return None
    parts = {number: tails[number][0].all_input_nodes[0] for number in numbers}
    late = {node for number in numbers for node in tails[number]}
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    early = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output") and node not in late]
    of_microbatch = graph_of(inputs, early, [parts.get(number, node) for number, node in enumerate(results)])
    of_step = graph_of(
        parts.values(),
        [node for number in numbers for node in tails[number]],
        [results[number] for number in numbers],
    )
    return DeferredReductions(boxed(gm, of_microbatch), boxed(gm, of_step), numbers)


def last_sums(gm: fx.GraphModule, program: Program) -> dict[int, list[fx.Node]]:
    """By number of a gradient, the all-reduces and waits that a backward graph may leave to the end of a step."""
    outputs = [output for output in program.outputs if output.kind is OutputKind.GRADIENT]
    results = list(results_of(gm.graph))
    tails = {
        number: tail
        for number, (output, node) in enumerate(zip(outputs, results, strict=True))
        if not output.is_between_stages and results.count(node) == 1 and (tail := _tail(node))
    }
    seen = [tail[0].all_input_nodes[0] for tail in tails.values()]
    return {number: tail for number, tail in tails.items() if seen.count(tail[0].all_input_nodes[0]) == 1}


def _tail(node: fx.Node | None) -> list[fx.Node]:
    """The all-reduces and waits that end in a gradient and serve nothing else, from the first on."""
    found: list[fx.Node] = []
    while node is not None and (is_wait(node) or _is_sum(node)) and len(node.users) == 1:
        found.append(node)
        node = node.all_input_nodes[0]
    while found and is_wait(found[-1]):
        found.pop()  # for a collective that stays
    return found[::-1]


def _is_sum(node: fx.Node) -> bool:
    return is_collective(node) and collective_kind(node) == "all_reduce" and node.args[1] == "sum"
