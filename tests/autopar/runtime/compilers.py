"""A compiler for runtime tests: layouts of parameters and inputs by hand, ops follow them, nothing is searched."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate

from autopar.capture.program import InputKind, OutputKind, Program
from autopar.capture.trace import capture
from autopar.passes.pipeline import emit
from autopar.runtime.step import CompiledStep, geometry_of
from autopar.sharding.assignment import Assignment, is_getitem
from autopar.sharding.layout import Layout, replicated
from autopar.sharding.op_call import call_of, tensor_inputs
from autopar.sharding.registry import rules_of
from autopar.sharding.strategies import Strategy, strategies_of


@dataclass(frozen=True)
class HandPlan:
    """Nothing but a hash."""

    hash: str


@dataclass
class FollowingCompiler:
    """Parameters lie in `parameters[name]` (else replicated), inputs in `batch`; each op keeps its inputs' layouts if
    a rule allows that, else runs replicated."""

    mesh: DeviceMesh
    batch: Layout | None = None
    parameters: Mapping[str, Layout] = field(default_factory=dict)
    salt: str = ""
    compiled: int = 0

    def compile_step(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        parameter_layouts: Mapping[str, Layout] | None,
        hosted: frozenset[str] | None,
    ) -> CompiledStep:
        self.compiled += 1
        program = capture(model, args, kwargs)
        layouts = self.parameters if parameter_layouts is None else parameter_layouts
        assignment = following_assignment(program, tuple(self.mesh.shape), self.batch, layouts)
        local = emit(program, assignment, geometry_of(self.mesh))
        return CompiledStep(program, assignment, local, HandPlan(hashlib.sha256(self.salt.encode()).hexdigest()))


def following_assignment(
    program: Program, mesh_shape: tuple[int, ...], batch: Layout | None, parameters: Mapping[str, Layout]
) -> Assignment:
    """Ops follow what they read; gradients return to the parameters' layouts, outputs to every rank."""
    everywhere = replicated(len(mesh_shape))
    nodes = {node.name: node for node in program.graph_module.graph.nodes}
    inputs: dict[str, Layout] = {}
    for item in program.inputs:
        shape = nodes[item.node].meta["val"].shape
        cut = item.kind in (InputKind.INPUT, InputKind.TANGENT) and len(shape) > 0
        inputs[item.node] = (batch or everywhere) if cut else parameters.get(item.name, everywhere)
    strategies = _follow(program.graph_module, mesh_shape, inputs)
    outputs = tuple(_output_layout(output, parameters, everywhere, program) for output in program.outputs)
    return Assignment(mesh_shape, strategies, inputs, outputs)


def _output_layout(
    output: Any, parameters: Mapping[str, Layout], everywhere: Layout, program: Program
) -> Layout | None:
    if output.kind is OutputKind.GRADIENT:
        return parameters.get(output.name, everywhere)
    beside_loss = output.kind is OutputKind.OUTPUT and any(item.kind is OutputKind.LOSS for item in program.outputs)
    return None if beside_loss else everywhere


def _follow(gm: fx.GraphModule, mesh_shape: tuple[int, ...], inputs: Mapping[str, Layout]) -> dict[str, Strategy]:
    strategies: dict[str, Strategy] = {}
    assignment = Assignment(mesh_shape, strategies, inputs, ())
    for node in gm.graph.nodes:
        if node.op == "call_function" and not is_getitem(node):
            strategies[node.name] = _following_strategy(node, assignment, mesh_shape)
    return strategies


def _following_strategy(node: fx.Node, assignment: Assignment, mesh_shape: tuple[int, ...]) -> Strategy:
    call = call_of(node)
    layouts = [assignment.layout_of(source) for source in tensor_inputs(node)]
    choices = strategies_of(call, rules_of(call), mesh_shape)
    return max(choices, key=lambda choice: _agreement(choice.inputs, layouts))


def _agreement(wanted: tuple[Layout, ...], given: list[Layout]) -> int:
    """How many placements an op keeps; shards and partial sums kept count for it, replicas cut up against it."""
    score = 0
    for want, have in zip(wanted, given, strict=True):
        for one, other in zip(want, have, strict=True):
            if one == other:
                score += 0 if isinstance(one, Replicate) else 3
            elif isinstance(one, Partial):  # nothing is made a partial sum
                score -= 100
            elif isinstance(other, Replicate):
                score -= 2
    return score
