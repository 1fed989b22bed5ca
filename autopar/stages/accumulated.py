"""Microbatches as gradient accumulation has them: each a batch with its own statistics; their losses are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial

from autopar.capture.program import InputKind, OutputKind, Program, is_number, results_of
from autopar.errors import MicrobatchError
from autopar.fake_calls import FakeCalls
from autopar.passes.copy_graph import copy_graph
from autopar.passes.localize import fake_mode_of
from autopar.stages.microbatch import Microbatches, independent_microbatches
from autopar.stages.stage_programs import StageProgram


def accumulated_microbatches(program: Program, count: int) -> Microbatches:
    """`count` microbatches of which `program`, captured on the first, is one, between two updates of the weights.

    The loss, and any other output of one floating-point number, is the mean of theirs, gradients are those of the loss,
    and each microbatch reads the buffers that the one before it wrote. Raises MicrobatchError for a model that is
    differentiated from anything but its own loss.
    """
    differentiable = [output for output in program.outputs if output.differentiable]
    if differentiable and [output.kind for output in differentiable] != [OutputKind.LOSS]:
        raise MicrobatchError(
            "the mean of the microbatches' losses is not known: the model does not return its loss",
            fix="return the loss from the model, or leave batch_semantics out",
        )
    places = _places_of_means(program)
    pieces = independent_microbatches(_shares_of_means(program, places, count), count)
    outputs = (Partial() if place in places else item for place, item in enumerate(pieces.outputs))
    return replace(pieces, outputs=tuple(outputs), accumulated=True)


def _places_of_means(program: Program) -> list[int]:
    """Where among the program's outputs means are: without gradients nothing tells a loss from another number."""
    kinds, pairs = (OutputKind.LOSS, OutputKind.OUTPUT), zip(program.outputs, program.results, strict=True)
    return [place for place, (item, node) in enumerate(pairs) if item.kind in kinds and is_number(node.meta["val"])]


def _shares_of_means(program: Program, places: Sequence[int], count: int) -> Program:
    """The program with the outputs at `places`, and what arrives at them, divided by `count`: the sums over
    microbatches are means."""
    if count == 1 or not places:
        return program
    gm = copy_graph(program.graph_module)
    calls, results = FakeCalls(fake_mode_of(gm)), list(results_of(gm.graph))
    nodes, shares = {node.name: node for node in gm.graph.nodes}, dict[str, fx.Node]()
    for place in places:
        name = program.results[place].name
        if name not in shares:
            with gm.graph.inserting_after(nodes[name]):
                shares[name] = _divided(gm.graph, nodes[name], count, calls, nodes[name].meta)
        results[place] = shares[name]
    gm.graph.output_node().args = (tuple(results),)
    for item in program.inputs:
        tangent = nodes[item.node]
        if item.kind is InputKind.TANGENT and tangent.users:
            reader = min(tangent.users)  # the first in the graph
            with gm.graph.inserting_before(reader):
                share = _divided(gm.graph, tangent, count, calls, reader.meta)
            tangent.replace_all_uses_with(share, delete_user_cb=lambda user, own=share: user is not own)
    gm.graph.lint()
    return replace(program, graph_module=gm)


def _divided(graph: fx.Graph, node: fx.Node, count: int, calls: FakeCalls, meta: dict[str, Any]) -> fx.Node:
    """`node / count`, where the caller inserts; described as the op that `meta` is of."""
    divide = torch.ops.aten.div.Scalar
    made = graph.call_function(divide, (node, count))
    made.meta.update(meta, val=calls(divide, (node.meta["val"], count), {}), key=f"{meta['key']}.of_mean")
    return made


def refuse_stale_buffers(stages: Sequence[StageProgram]) -> None:
    """Refuse a buffer that one stage writes and another reads: microbatches that follow each other would not read what
    the one before has written. Raises MicrobatchError."""
    written = {
        output.name: stage.index
        for stage in stages
        for output in stage.program.outputs
        if output.kind is OutputKind.BUFFER
    }
    for stage in stages:
        for item in stage.program.inputs:
            if item.kind is InputKind.BUFFER and written.get(item.name, stage.index) != stage.index:
                raise MicrobatchError(
                    f"the buffer {item.name!r} is written by stage {written[item.name]} and read by {stage.index}",
                    fix="use one module for each place in the model, or microbatches=1",
                )
