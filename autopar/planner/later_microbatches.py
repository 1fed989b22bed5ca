"""Microbatches that are shorter than the first, for which stages are planned: whether they divide as it does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, fx

from autopar.errors import NotDivisibleError
from autopar.planner.make import Planned
from autopar.sharding.assignment import Assignment, is_getitem
from autopar.sharding.layout import Layout, ranks_per_dim
from autopar.sharding.op_call import walk
from autopar.stages.staged import Staged


def refuse_uneven(staged: Staged, planned: Sequence[Planned]) -> None:
    """Raise NotDivisibleError where a later microbatch has a dim that ranks do not divide and the first one's they do.

    What the first one cuts unevenly its ops were chosen for.
    """
    for variant in staged.variants[1:]:
        for first, stage, item in zip(staged.stages, variant.stages, planned, strict=True):
            own = dict(_cut_values(stage.program.graph_module.graph, item.assignment))
            for key, (value, layout) in _cut_values(first.program.graph_module.graph, item.assignment):
                shapes = value.shape, own[key][0].shape
                ways = ranks_per_dim(len(shapes[0]), layout, item.assignment.mesh_shape)
                for size, other, count in zip(*shapes, ways, strict=True):
                    if size % count == 0 and other % count:
                        raise NotDivisibleError(
                            f"a later microbatch has {other} where the first has {size}: that does not divide over "
                            f"{count} ranks",
                            fix="use a batch that divides into equal microbatches, or fewer or more of them",
                        )


def _cut_values(graph: fx.Graph, assignment: Assignment) -> Iterator[tuple[tuple[str, int], tuple[Tensor, Layout]]]:
    """By node and output: the values of a program, whole, with their layouts."""
    for node in graph.nodes:
        if node.op == "placeholder":
            yield (node.name, 0), (node.meta["val"], assignment.inputs[node.name])
        elif node.op == "call_function" and not is_getitem(node) and node.name in assignment.strategies:
            outputs = assignment.strategies[node.name].outputs
            values = [value for value in walk(node.meta["val"]) if isinstance(value, Tensor)]
            if len(values) == len(outputs):
                yield from (((node.name, place), pair) for place, pair in enumerate(zip(values, outputs, strict=True)))
