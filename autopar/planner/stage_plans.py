"""What a stage of a pipeline costs: times of its actions, memory, what it sends."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.capture.program import OutputKind, results_of
from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.hardware import AxisLinks
from autopar.cost_models.pipeline import StageTimes
from autopar.mesh import Mesh
from autopar.passes.copies import OFFLOAD, RELOAD, is_copy, is_copy_wait
from autopar.passes.pipeline import LocalProgram
from autopar.planner.make import Planned
from autopar.planner.node_prices import node_seconds
from autopar.planner.prices import Prices
from autopar.planner.stage_memory import stage_memory
from autopar.planner.stage_storages import StageStorages, stage_graphs, stage_storages
from autopar.schedules.memory import StageMemory
from autopar.stages.assign import size_of
from autopar.stages.staged import Staged


@dataclass(frozen=True)
class StageCosts:
    """What one microbatch costs a stage on its largest rank."""

    times: StageTimes
    memory: StageMemory
    storages: StageStorages
    sent_bytes: int
    reduce_s: float = 0.0  # once a step: sums of gradients over the stage's ranks


def stage_costs(staged: Staged, stage: int, planned: Planned, mesh: Mesh, link: AxisLinks) -> StageCosts:
    """Times and memory of a stage from its emitted program. `link`: to the next stage."""
    local, prices = planned.local, Prices(mesh)
    graphs = stage_graphs(planned, staged.microbatches.count)
    forward_s = _seconds(local.forward, local, prices)
    input_s = weight_s = reduce_s = 0.0
    if graphs.split is not None:
        input_s, weight_s = (_seconds(it, local, prices) for it in (graphs.split.of_inputs, graphs.split.of_weights))
        weight_s += _added_on_host_s(planned)
    sent = sent_bytes(local)
    times = StageTimes(forward_s, input_s, weight_s, send_seconds(link, sent))
    if graphs.deferred is not None:
        reduce_s = _seconds(graphs.deferred.of_step, local, prices)
    storages = stage_storages(staged, planned, graphs)
    return StageCosts(times, stage_memory(staged, stage, storages), storages, sent, reduce_s)


def _seconds(gm: fx.GraphModule, local: LocalProgram, prices: Prices) -> float:
    """Copies to the host and back run beside what follows them, one after the other in each direction, until they are
    waited for; what hides them is slowed down as by any communication."""
    now_s = copies_s = exposed_s = 0.0
    free_s = {OFFLOAD: 0.0, RELOAD: 0.0}
    ready_s: dict[fx.Node, float] = {}
    for node in gm.graph.nodes:
        seconds = node_seconds(node, prices, local.geometry)
        if is_copy(node):
            free_s[node.target] = ready_s[node] = max(now_s, free_s[node.target]) + seconds
            copies_s += seconds
        elif is_copy_wait(node):
            waited_s = max(0.0, ready_s.get(node.all_input_nodes[0], 0.0) - now_s)
            now_s, exposed_s = now_s + waited_s, exposed_s + waited_s
        else:
            now_s += seconds
    return now_s + (1 - prices.mesh.profile.overlap) * max(0.0, copies_s - exposed_s)


def _added_on_host_s(planned: Planned) -> float:
    """A microbatch's share of adding up the gradients of parameters on the host."""
    trained = {output.name for output in planned.local.program.outputs if output.kind is OutputKind.GRADIENT}
    names = {item.node: item.name for item in planned.local.program.inputs}
    nodes = (node for node in planned.local.forward.graph.nodes if node.op == "placeholder")
    there = planned.assignment.hosted - planned.assignment.staying
    hosted = (node for node in nodes if node.name in there and names[node.name] in trained)
    return sum(planned.planner.prices.hosted_sum(size_of(node)) for node in hosted)


def sent_bytes(local: LocalProgram) -> int:
    """Bytes that leave a rank forward for one microbatch."""
    early = [output for output in local.program.outputs if output.kind is not OutputKind.GRADIENT]
    results = results_of(local.forward.graph)
    pairs = zip(early, results, strict=False)
    return sum(size_of(node) for output, node in pairs if output.kind is OutputKind.LEAVING and node is not None)


def send_seconds(link: AxisLinks, bytes_: int) -> float:
    """Seconds to send that many bytes to the next stage."""
    return float(collective_seconds("send", bytes_, link)) if bytes_ else 0.0
