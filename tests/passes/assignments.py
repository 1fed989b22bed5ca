"""Random valid assignments: any layout of any input, any strategy of any op."""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch.distributed.tensor import Replicate, Shard

from autopar.capture.program import InputKind, OutputKind, Program
from autopar.sharding.assignment import Assignment, is_getitem
from autopar.sharding.layout import Layout, is_partial
from autopar.sharding.op_call import TensorSpec, call_of, spec_of, tensor_inputs
from autopar.sharding.registry import rules_of
from autopar.sharding.reshard import effective_layout
from autopar.sharding.strategies import Strategy, strategies_of


def random_assignment(program: Program, mesh_shape: tuple[int, ...], seed: int) -> Assignment:
    """Strategies that can be reached from what their inputs are made in; gradients leave as their parameters lie."""
    choose = random.Random(seed)
    nodes = {node.name: node for node in program.graph_module.graph.nodes}
    inputs = {
        item.node: (Replicate(),) * len(mesh_shape)
        if item.kind is InputKind.SEED
        else _random_layout(spec_of(nodes[item.node].meta["val"]), mesh_shape, choose)
        for item in program.inputs
    }
    strategies: dict[str, Strategy] = {}
    assignment = Assignment(mesh_shape, strategies, inputs, ())
    for node in nodes.values():
        if node.op == "call_function" and not is_getitem(node):
            call = call_of(node)
            made = [assignment.layout_of(source) for source in tensor_inputs(node)]
            options = [
                strategy
                for strategy in strategies_of(call, rules_of(call), mesh_shape)
                if all(_reachable(*ends, mesh_shape) for ends in zip(made, strategy.inputs, strict=True))
            ]
            strategies[node.name] = choose.choice(options)
    layouts = {item.name: inputs[item.node] for item in program.inputs if item.kind is not InputKind.TANGENT}
    outputs = tuple(
        layouts[item.name]
        if item.kind in (OutputKind.GRADIENT, OutputKind.BUFFER)
        else (Replicate(),) * len(mesh_shape)
        for item in program.outputs
    )
    return Assignment(mesh_shape, strategies, inputs, outputs)


def _random_layout(spec: TensorSpec, mesh_shape: Sequence[int], choose: random.Random) -> Layout:
    return tuple(choose.choice([Replicate(), *map(Shard, range(len(spec.shape)))]) for _ in mesh_shape)


def _reachable(made: Layout, wanted: Layout, mesh_shape: Sequence[int]) -> bool:
    """Whether a value made in one layout can be had in another: nothing becomes partial, and reductions do not mix."""
    made, wanted = effective_layout(made, mesh_shape), effective_layout(wanted, mesh_shape)
    return all(want == have for have, want in zip(made, wanted, strict=True) if is_partial(want))
