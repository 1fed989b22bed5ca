"""One stage as the executor sees it: which value goes into which placeholder, and what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, fx

from autopar.capture.program import InputKind, Program, ProgramInput, ProgramOutput
from autopar.passes.defer_reductions import DeferredReductions, defer_reductions
from autopar.passes.pipeline import LocalProgram
from autopar.passes.split_weights import SplitBackward, split_weights
from autopar.runtime.bound_step import placeholder_names
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout import Layout


@dataclass(frozen=True)
class StageVariant:
    """A stage's program for microbatches of one kind, emitted for every lane."""

    program: Program
    assignment: Assignment
    lanes: tuple[LocalProgram, ...]
    microbatches: int = 1

    @cached_property
    def forward(self) -> list[fx.GraphModule]:
        return [lane.forward for lane in self.lanes]

    @cached_property
    def backward(self) -> list[fx.GraphModule]:
        """Each lane's backward graph, without the sums in `reductions`; empty for a stage without gradients."""
        whole = [lane.backward for lane in self.lanes if lane.backward is not None]
        return [cut.of_microbatch for cut in self.deferred] or whole

    @cached_property
    def deferred(self) -> list[DeferredReductions]:
        """What each lane sums over its stage's ranks once for several microbatches; empty for nothing."""
        if self.microbatches == 1:
            return []
        graphs = [lane.backward for lane in self.lanes if lane.backward is not None]
        found = [cut for gm in graphs if (cut := defer_reductions(gm, self.program)) is not None]
        assert len(found) in (0, len(graphs)), "ranks of one stage differ in what they sum"
        return found

    @cached_property
    def split(self) -> list[SplitBackward]:
        return [split_weights(graph, self.program) for graph in self.backward]

    @cached_property
    def inputs(self) -> Mapping[str, ProgramInput]:
        """By placeholder."""
        return {item.node: item for item in self.program.inputs}

    @cached_property
    def hosted(self) -> frozenset[str]:
        """The parameters that lie on the host, by name."""
        return frozenset(self.inputs[node].name for node in self.assignment.hosted)

    @cached_property
    def staying(self) -> frozenset[str]:
        """Those of them whose gradients stay on the device until the end of the step."""
        return frozenset(self.inputs[node].name for node in self.assignment.staying)

    @cached_property
    def forward_names(self) -> list[str]:
        return placeholder_names(self.forward[0])

    @cached_property
    def backward_names(self) -> list[str]:
        return placeholder_names(self.backward[0]) if self.backward else []

    @cached_property
    def output_layouts(self) -> Mapping[ProgramOutput, Layout]:
        """How each output leaves."""
        found = {}
        pairs = zip(self.program.outputs, self.program.results, self.assignment.outputs, strict=True)
        for output, node, layout in pairs:
            found[output] = self.assignment.layout_of(node) if layout is None else layout
        return found

    @cached_property
    def output_shapes(self) -> Mapping[ProgramOutput, tuple[int, ...]]:
        pairs = zip(self.program.outputs, self.program.results, strict=True)
        return {output: tuple(node.meta["val"].shape) for output, node in pairs}

    def input_layout(self, node: str) -> Layout:
        return self.assignment.inputs[node]

    @cached_property
    def between(self) -> Mapping[tuple[InputKind, str], str]:
        """The placeholders of values of other stages, by kind and name."""
        kinds = (InputKind.ARRIVING, InputKind.TANGENT)
        return {(item.kind, item.name): item.node for item in self.program.inputs if item.kind in kinds}

    def received(self, lane: int, kind: InputKind, name: str) -> Tensor:
        """The fake local value of something that arrives: what to allocate for it."""
        node = self.between[kind, name]
        found = self._locals[lane].get(node)
        assert found is not None, f"{name} is not read"
        return found

    @cached_property
    def parameter_nodes(self) -> Mapping[str, tuple[int, ...]]:
        """The full shapes of the stage's parameters, by placeholder."""
        kinds = {item.node: item.kind for item in self.program.inputs}
        nodes = self.program.graph_module.graph.nodes
        return {
            node.name: tuple(node.meta["val"].shape)
            for node in nodes
            if node.op == "placeholder" and kinds[node.name] is InputKind.PARAMETER
        }

    def local_value(self, node: str) -> Tensor:
        """The first lane's fake part of a placeholder."""
        return self._locals[0][node]

    @cached_property
    def _locals(self) -> list[dict[str, Tensor]]:
        return [
            {
                node.name: node.meta["val"]
                for graph in (lane.forward, lane.backward)
                for node in (graph.graph.nodes if graph is not None else ())
                if node.op == "placeholder"
            }
            for lane in self.lanes
        ]
