"""Plans that experts write by hand, for the small perceptron, and what is emitted for them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx
from torch.distributed.tensor import Replicate, Shard

from autopar.capture.program import InputKind, OutputKind, Program
from autopar.passes.local_call import RankGeometry
from autopar.passes.pipeline import LocalProgram, emit
from autopar.runtime.virtual_groups import virtual_group_names
from autopar.sharding.assignment import Assignment, is_getitem
from autopar.sharding.layout import Layout
from autopar.sharding.op_call import call_of, tensor_inputs
from autopar.sharding.registry import rules_of
from autopar.sharding.reshard import reshard_steps
from autopar.sharding.strategies import Strategy, strategies_of
from tests.passes.programs import captured

MESH = (2,)
S0, S1, R = (Shard(0),), (Shard(1),), (Replicate(),)


def assigned(program: Program, batch: Layout, parameters: Mapping[str, Layout]) -> Assignment:
    """Activations follow the batch: each op runs where its largest input lies, and takes the others there."""
    names = {item.node: item for item in program.inputs}
    strategies: dict[str, Strategy] = {}
    nodes = list(program.graph_module.graph.nodes)
    inputs = {name: parameters.get(item.name, R) for name, item in names.items()}
    for node in nodes:
        if node.op == "placeholder" and names[node.name].kind is InputKind.INPUT:
            inputs[node.name] = batch
    assignment = Assignment(MESH, strategies, inputs, ())
    for node in nodes:
        if node.op == "call_function" and not is_getitem(node):
            strategies[node.name] = _cheapest(node, assignment, 1 if batch == S0 else -1)
    outputs = tuple(
        parameters.get(output.name, R) if output.kind is OutputKind.GRADIENT else R for output in program.outputs
    )
    return Assignment(MESH, strategies, inputs, outputs)


def _cheapest(node: fx.Node, assignment: Assignment, price_of_replica: int) -> Strategy:
    """The strategy whose inputs take the fewest bytes to bring; of those, the one with the cheapest replicas."""
    call = call_of(node)
    made = [assignment.layout_of(source) for source in tensor_inputs(node)]

    def cost(strategy: Strategy) -> tuple[int, int]:
        moved = 0
        for spec, source, target in zip(call.inputs, made, strategy.inputs, strict=True):
            if any(it.is_partial() for it in target) and source != target:
                return 10**9, 0
            moved += sum(step.bytes for step in reshard_steps(spec, source, target, MESH, lambda *_: 0.0))
        return moved, price_of_replica * sum(layout == R for layout in (*strategy.inputs, *strategy.outputs))

    return min(strategies_of(call, rules_of(call), MESH), key=cost)


def emitted(batch: Layout, parameters: Mapping[str, Layout]) -> LocalProgram:
    _, _, program = captured("mlp")
    geometry = RankGeometry(MESH, (0,), virtual_group_names((0,), MESH), "cpu")
    return emit(program, assigned(program, batch, parameters), geometry)
