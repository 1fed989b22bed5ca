"""The captured program: one joint graph, forward then backward, and what its inputs and outputs stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.utils._pytree import TreeSpec

from autopar.errors import OmittedOutputError

BETWEEN_STAGES = "value:"
"""How the names of values begin that go from one pipeline stage to another."""


class InputKind(Enum):
    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"  # a tensor of the user's call
    TANGENT = "tangent"  # the gradient that arrives at an output
    SEED = "seed"  # the step's random seed, int64 scalar
    CONSTANT = "constant"  # a tensor that the model holds but does not register
    ARRIVING = "arriving"  # a value of an earlier pipeline stage


class OutputKind(Enum):
    LOSS = "loss"  # a scalar output that is differentiated
    OUTPUT = "output"
    BUFFER = "buffer"  # the new value of a mutated buffer
    GRADIENT = "gradient"
    LEAVING = "leaving"  # a value for later pipeline stages


@dataclass(frozen=True, slots=True)
class ProgramInput:
    """One placeholder. `name`: the parameter's or buffer's dotted name, the path of the input in the user's call."""

    node: str
    kind: InputKind
    name: str


@dataclass(frozen=True, slots=True)
class ProgramOutput:
    """One element of the graph's flat output tuple. `name`: of the buffer or parameter, or the output's path."""

    kind: OutputKind
    name: str
    differentiable: bool = False  # has a tangent among the inputs

    @property
    def is_between_stages(self) -> bool:
        """Whether it is a gradient that the backward of a pipeline stage gives to an earlier stage."""
        return self.kind is OutputKind.GRADIENT and self.name.startswith(BETWEEN_STAGES)


@dataclass(frozen=True, slots=True)
class LeafIndex:
    """Stands, among the leaves of the user's output, for the graph output of that index."""

    index: int


@dataclass(frozen=True, slots=True)
class OmittedOutput:
    """Stands, in the user's result, for an object that is no tensor and was not carried over, as a key-value cache.

    Whoever uses it gets an OmittedOutputError: better than a wrong or missing value.
    """

    name: str
    type_name: str
    remedy: str = "return its tensors in tuples, lists or dicts (a cache: use_cache=False, and ask the original model)"

    def __getattr__(self, attribute: str) -> NoReturn:
        raise self._error()

    def __getitem__(self, index: object) -> NoReturn:
        raise self._error()

    def __iter__(self) -> NoReturn:
        raise self._error()

    def __len__(self) -> NoReturn:
        raise self._error()

    def _error(self) -> OmittedOutputError:
        return OmittedOutputError(
            f"the output {self.name!r}, a {self.type_name}, is not carried over by the distributed program",
            fix=self.remedy,
        )


def results_of(graph: fx.Graph) -> tuple[fx.Node | None, ...]:
    """What a graph returns: a flat list of nodes, None for a gradient that there is not."""
    results: Any = graph.output_node().args[0]
    return tuple(results)


@dataclass(frozen=True)
class Program:
    """A joint graph in functional ATen ops.

    Every node has `meta["val"]` (fake tensor, full shape), `meta["phase"]` ("forward" or "backward"), `meta["module"]`
    (dotted path), `meta["key"]` (stable name: module path, op, occurrence), `meta["where"]` (the user's line, or "").
    `outputs` run: user outputs, mutated buffers, gradients. `output_spec` rebuilds the user's output from the flat
    list in which `output_leaves` says, per leaf, the `LeafIndex` of a graph output, or a plain Python value. `notes`:
    what a plan has to say of how it was captured.
    """

    graph_module: fx.GraphModule
    inputs: tuple[ProgramInput, ...]
    outputs: tuple[ProgramOutput, ...]
    input_spec: TreeSpec  # of (args, kwargs)
    output_spec: TreeSpec
    output_leaves: tuple[object, ...]
    tied: tuple[tuple[str, str], ...]  # (other name, name of the parameter or buffer that it shares)
    constants: Mapping[str, torch.Tensor]
    notes: tuple[str, ...] = ()

    @cached_property
    def early_outputs(self) -> tuple[ProgramOutput, ...]:
        """What the forward returns, before what it counts and saves."""
        return tuple(output for output in self.outputs if output.kind is not OutputKind.GRADIENT)

    @cached_property
    def gradients(self) -> tuple[ProgramOutput, ...]:
        """What the backward returns."""
        return tuple(output for output in self.outputs if output.kind is OutputKind.GRADIENT)

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The node of every output, in order."""
        nodes: Any = results_of(self.graph_module.graph)
        return tuple(nodes)  # a captured program has no gaps

    def named_inputs(self, kind: InputKind) -> dict[str, fx.Node]:
        """Placeholders of one kind by their names."""
        nodes = {node.name: node for node in self.graph_module.graph.nodes if node.op == "placeholder"}
        return {item.name: nodes[item.node] for item in self.inputs if item.kind is kind}


def is_number(value: Tensor) -> bool:
    """Whether a value is one floating-point or complex number, as a loss is."""
    return value.dim() == 0 and (value.is_floating_point() or value.is_complex())
