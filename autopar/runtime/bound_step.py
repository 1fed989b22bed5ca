"""A compiled step bound to a mesh: which value goes into which placeholder, and what comes out of which output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.program import InputKind, OutputKind
from autopar.passes.copy_experts import with_places
from autopar.passes.expert_places import ExpertPlaces
from autopar.passes.observed import ExpertCount
from autopar.passes.pipeline import emit
from autopar.runtime.inputs import check_inputs_divide
from autopar.runtime.step import CompiledStep, geometry_of
from autopar.sharding.layout import Layout

USER_OUTPUTS = (OutputKind.LOSS, OutputKind.OUTPUT)
RunGraph = Callable[[Any, list[Tensor], str], Sequence[Tensor]]  # a boxed graph, its inputs, `forward` or `backward`


def plainly(graph: Any, values: list[Tensor], _phase: str) -> Sequence[Tensor]:
    """Call a boxed graph, which empties `values`."""
    outputs: Sequence[Tensor] = graph(values)
    return outputs


@dataclass(frozen=True)
class Slot:
    """One tensor at the edge of a program: its name, its full shape, and the layout in which ranks hold it."""

    name: str
    node: str  # the placeholder; "" for an output
    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = False


@dataclass(frozen=True)
class Results:
    """What the forward graph of one rank returned, in local shapes."""

    outputs: list[Tensor]
    buffers: list[Tensor]
    counts: list[Tensor]  # of tokens by expert
    saved: list[Tensor]


class BoundStep:
    """Runs the local graphs of one compiled step; takes and returns this rank's parts."""

    def __init__(self, step: CompiledStep, mesh: DeviceMesh, places: Mapping[str, ExpertPlaces] | None = None) -> None:
        """`places`: by layer whose experts were moved, where each of them stands."""
        check_inputs_divide(step.program, step.assignment)
        self.planned, self.mesh, self.places = step, mesh, places
        self.copy_bytes = 0  # more than planned on this rank at the peak, with copies of experts
        self.step = step = replace(step, local=with_places(step.local, places or {}))
        kinds = {item.node: item.kind for item in step.program.inputs}
        self._forward_nodes = placeholder_names(step.local.forward)
        backward = step.local.backward
        self._backward_nodes = [] if backward is None else placeholder_names(backward)
        self.tangent_nodes = {node for node in self._backward_nodes if kinds.get(node) is InputKind.TANGENT}

    @cached_property
    def inputs(self) -> Mapping[InputKind, tuple[Slot, ...]]:
        """The placeholders of the program by kind."""
        program, assignment = self.step.program, self.step.assignment
        found: dict[InputKind, list[Slot]] = {kind: [] for kind in InputKind}
        nodes = {node.name: node for node in program.graph_module.graph.nodes if node.op == "placeholder"}
        for item in program.inputs:
            value: Tensor = nodes[item.node].meta["val"]
            layout = assignment.inputs[item.node]
            found[item.kind].append(Slot(item.name, item.node, layout, tuple(value.shape), value.dtype))
        return {kind: tuple(slots) for kind, slots in found.items()}

    @cached_property
    def _output_slots(self) -> tuple[tuple[OutputKind, Slot], ...]:
        program, assignment = self.step.program, self.step.assignment
        found = []
        for item, node, layout in zip(program.outputs, program.results, assignment.outputs, strict=True):
            value: Tensor = node.meta["val"]
            held = assignment.layout_of(node) if layout is None else layout
            slot = Slot(item.name, "", held, tuple(value.shape), value.dtype, item.differentiable)
            found.append((item.kind, slot))
        return tuple(found)

    @cached_property
    def outputs(self) -> tuple[tuple[OutputKind, Slot], ...]:
        """The user's outputs with their kinds."""
        return tuple(pair for pair in self._output_slots if pair[0] in USER_OUTPUTS)

    @cached_property
    def buffers(self) -> tuple[Slot, ...]:
        """The buffers whose new values the forward returns."""
        return tuple(slot for kind, slot in self._output_slots if kind is OutputKind.BUFFER)

    @cached_property
    def expert_counts(self) -> tuple[ExpertCount, ...]:
        """What the forward counts."""
        return self.step.local.expert_counts

    @cached_property
    def gradients(self) -> tuple[Slot, ...]:
        """The gradients that the backward returns, in its order."""
        return tuple(slot for kind, slot in self._output_slots if kind is OutputKind.GRADIENT)

    @cached_property
    def hosted(self) -> frozenset[str]:
        """The parameters that lie on the host, by name."""
        return frozenset(slot.name for slot in self.inputs[InputKind.PARAMETER] if slot.node in self.hosted_nodes)

    @property
    def hosted_nodes(self) -> Set[str]:
        """The same by placeholder."""
        return self.step.assignment.hosted

    def settle_host(self) -> None:
        """Wait until all copies to the host and back are complete: what lies there may then be read and written."""
        if self.hosted_nodes and self.mesh.device_type != "cpu":
            torch.accelerator.current_stream().synchronize()

    @cached_property
    def has_loss(self) -> bool:
        return any(kind is OutputKind.LOSS for kind, _ in self.outputs)

    @cached_property
    def deferred(self) -> BoundStep:
        """The same step, with gradients that leave as they are computed: sums over ranks not yet taken."""
        step = self.planned
        layouts = tuple(
            None if output.kind is OutputKind.GRADIENT else layout
            for output, layout in zip(step.program.outputs, step.assignment.outputs, strict=True)
        )
        assignment = replace(step.assignment, outputs=layouts)
        local = emit(step.program, assignment, geometry_of(self.mesh))
        return BoundStep(replace(step, assignment=assignment, local=local), self.mesh, self.places)

    def with_places(self, places: Mapping[str, ExpertPlaces]) -> BoundStep:
        """The same step, once experts were moved."""
        return BoundStep(self.planned, self.mesh, places)

    def run_forward(self, values: Mapping[str, Tensor], run: RunGraph = plainly) -> Results:
        """Run the forward graph on local values by placeholder."""
        with torch.autocast(self.mesh.device_type, enabled=False):
            results = list(run(self.step.local.forward, [values[node] for node in self._forward_nodes], "forward"))
        sizes = (len(self.outputs), len(self.buffers), len(self.expert_counts))
        users, buffers, counts = accumulate(sizes)
        return Results(results[:users], results[users:buffers], results[buffers:counts], results[counts:])

    def run_backward(
        self, saved: list[Tensor], tangents: Mapping[str, Tensor], run: RunGraph = plainly
    ) -> Sequence[Tensor]:
        """Run the backward graph; `saved` is emptied, so that each tensor dies at its last use."""
        backward = self.step.local.backward
        assert backward is not None
        saved.reverse()
        values = [tangents[node] if node in self.tangent_nodes else saved.pop() for node in self._backward_nodes]
        with torch.autocast(self.mesh.device_type, enabled=False):
            return run(backward, values, "backward")


def placeholder_names(gm: fx.GraphModule) -> list[str]:
    """The graph's inputs in order, by node name."""
    return [node.name for node in gm.graph.nodes if node.op == "placeholder"]
