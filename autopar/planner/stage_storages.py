"""What the executor runs of a stage, with the storages of each of its graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import fx
from torch.distributed.tensor import Shard

from autopar.capture.program import InputKind, Program
from autopar.passes.copies import OFFLOAD
from autopar.passes.defer_reductions import DeferredReductions, defer_reductions
from autopar.passes.pipeline import LocalProgram
from autopar.passes.split_weights import SplitBackward, split_weights
from autopar.passes.storages import storages_of
from autopar.planner.graph_storages import GraphStorages, graph_storages, is_packed
from autopar.planner.make import Planned
from autopar.sharding.layout import REPLICATE
from autopar.stages.assign import size_of
from autopar.stages.stage_programs import is_boundary
from autopar.stages.staged import Staged

CALL = (InputKind.INPUT, InputKind.BUFFER, InputKind.CONSTANT, InputKind.TANGENT)


@dataclass(frozen=True)
class StageGraphs:
    """A stage's graphs on its busiest rank. `backward`: for each microbatch, without the sums over the ranks that are
    made once for all of them."""

    local: LocalProgram
    backward: fx.GraphModule | None
    split: SplitBackward | None
    deferred: DeferredReductions | None

    @property
    def program(self) -> Program:
        return self.local.program


def stage_graphs(planned: Planned, microbatches: int) -> StageGraphs:
    """What runs of a stage for each of so many microbatches."""
    local = planned.local
    if local.backward is None:
        return StageGraphs(local, None, None, None)
    deferred = defer_reductions(local.backward, local.program) if microbatches > 1 else None
    backward = local.backward if deferred is None else deferred.of_microbatch
    return StageGraphs(local, backward, split_weights(backward, local.program), deferred)


@dataclass(frozen=True)
class StageStorages:
    """The storages of a stage's graphs. What other actions hold anyway is left out: weights, what is on the host, and
    inputs of the call of which a rank's part is a view of the whole.

    `weights`: bytes of each, wherever it lies; `fixed`: of those on the device, with the optimizer's state. `received`:
    by kind and name, bytes of what comes of other stages.
    """

    graphs: StageGraphs
    held_anyway: frozenset[int]
    weights: Mapping[str, int]
    fixed: Mapping[str, int]
    received: Mapping[tuple[InputKind, str], int]

    @property
    def program(self) -> Program:
        return self.graphs.program

    @cached_property
    def forward(self) -> GraphStorages:
        return graph_storages(self.graphs.local.forward, self.held_anyway)

    @cached_property
    def backward(self) -> GraphStorages:
        assert self.graphs.backward is not None
        return graph_storages(self.graphs.backward, self.held_anyway)

    @cached_property
    def of_inputs(self) -> GraphStorages:
        return graph_storages(self.split.of_inputs, self.held_anyway)

    @cached_property
    def of_weights(self) -> GraphStorages:
        return graph_storages(self.split.of_weights, self.held_anyway)

    @cached_property
    def of_step(self) -> GraphStorages:
        assert self.graphs.deferred is not None
        return graph_storages(self.graphs.deferred.of_step, self.held_anyway)

    @property
    def split(self) -> SplitBackward:
        assert self.graphs.split is not None
        return self.graphs.split

    @cached_property
    def weight_nodes(self) -> frozenset[str]:
        """The placeholders of parameters."""
        return frozenset(item.node for item in self.program.inputs if item.kind is InputKind.PARAMETER)

    @cached_property
    def inputs(self) -> Mapping[str, tuple[InputKind, str]]:
        """By placeholder, what goes into it."""
        return {item.node: (item.kind, item.name) for item in self.program.inputs}


def stage_storages(staged: Staged, planned: Planned, graphs: StageGraphs) -> StageStorages:
    """The storages of one stage on its largest rank."""
    nodes = {node.name: node for node in graphs.local.joint.graph.nodes if node.op == "placeholder"}
    items = [item for item in graphs.program.inputs if item.node in nodes]
    received: dict[tuple[InputKind, str], int] = {
        (item.kind, item.name): size_of(nodes[item.node])
        for item in items
        if item.kind in (InputKind.ARRIVING, InputKind.TANGENT)
    }
    state = _optimizer_state(planned)
    weights = {
        item.name: sum(storages_of(nodes[item.node]).values()) for item in items if item.kind is InputKind.PARAMETER
    }
    hosted = {item.name for item in items if item.node in planned.assignment.hosted}
    fixed = {name: 0 if name in hosted else bytes_ + state[name] for name, bytes_ in weights.items()}
    return StageStorages(graphs, _held_anyway(staged, planned), weights, fixed, received)


def _optimizer_state(planned: Planned) -> dict[str, int]:
    """By parameter, what the optimizer keeps for it on the device of the fullest rank."""
    prices, found = planned.planner.prices, {}
    for decision, pick in zip(planned.planning.decisions, planned.choice, strict=True):
        if decision.kind == "parameter":
            (layout,), (spec,) = decision.strategies[pick].outputs, decision.specs
            assert spec is not None
            state = planned.planner.options.optimizer.bytes(spec, layout, prices.mesh.shape)
            found[decision.name] = 0 if decision.node in planned.assignment.hosted else state
    return found


def _held_anyway(staged: Staged, planned: Planned) -> frozenset[int]:
    program, layouts, over_time = planned.local.program, planned.assignment.inputs, staged.microbatches.inputs
    kinds = {item.node: item.kind for item in program.inputs if not is_boundary(item.name)}
    found: set[int] = set()
    for node in planned.local.joint.graph.nodes:
        kind = kinds.get(node.name) if node.op == "placeholder" else None
        viewed = over_time.get(node.name, REPLICATE) in (REPLICATE, Shard(0)) and not is_packed(node)
        whole = all(placement == REPLICATE for placement in layouts.get(node.name, ()))
        if kind is InputKind.PARAMETER or (kind in CALL and viewed and whole) or node.target is OFFLOAD:
            found |= storages_of(node).keys()
    return frozenset(found)
