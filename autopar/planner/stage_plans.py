"""The plan of a pipeline from those of its stages: times of actions, memory in flight, the simulated step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.capture.program import InputKind, OutputKind, results_of
from autopar.cost_models.pipeline import StageTimes
from autopar.mesh import Mesh
from autopar.passes.pipeline import LocalProgram
from autopar.passes.split_weights import split_weights
from autopar.planner.make import Planned
from autopar.planner.node_prices import node_seconds
from autopar.planner.prices import Prices
from autopar.stages.assign import size_of

GRADIENT_COPIES = 2  # the sum so far, and what the microbatch adds


@dataclass(frozen=True)
class StageCosts:
    """What one microbatch costs a stage on its largest rank.

    `held_bytes`: parameters, optimizer state, gradients; `saved_bytes`: activations from a microbatch's forward to its
    backward; `working_bytes`: beyond these, while one microbatch is computed.
    """

    times: StageTimes
    held_bytes: int
    saved_bytes: int
    working_bytes: int
    sent_bytes: int

    def peak_bytes(self, in_flight: int) -> int:
        """With that many microbatches in flight."""
        return self.held_bytes + in_flight * self.saved_bytes + self.working_bytes


def stage_costs(planned: Planned, mesh: Mesh, send_s: float) -> StageCosts:
    """Times and memory of a stage from its emitted program. `send_s`: of its activations to the next stage."""
    local, prices = planned.local, Prices(mesh)
    forward_s = _seconds(local.forward, local, prices)
    input_s = weight_s = 0.0
    if local.backward is not None:
        split = split_weights(local.backward, local.program)
        input_s, weight_s = (_seconds(graph, local, prices) for graph in (split.of_inputs, split.of_weights))
    memory = planned.plan.memory
    saved = _saved_bytes(local)
    gradients = _gradient_bytes(local)
    held = memory.get("parameter", 0) + memory.get("buffer", 0) + memory.get("optimizer_state", 0)
    working = max(0, planned.plan.peak_bytes - held - saved - gradients)
    times = StageTimes(forward_s, input_s, weight_s, send_s)
    return StageCosts(times, held + GRADIENT_COPIES * gradients, saved, working, sent_bytes(local))


def _seconds(gm: fx.GraphModule, local: LocalProgram, prices: Prices) -> float:
    return sum(node_seconds(node, prices, local.geometry) for node in gm.graph.nodes)


def sent_bytes(local: LocalProgram) -> int:
    """Bytes that leave a rank forward for one microbatch."""
    early = [output for output in local.program.outputs if output.kind is not OutputKind.GRADIENT]
    results = results_of(local.forward.graph)
    pairs = zip(early, results, strict=False)
    return sum(size_of(node) for output, node in pairs if output.kind is OutputKind.LEAVING and node is not None)


def _saved_bytes(local: LocalProgram) -> int:
    """Bytes of distinct storages that the forward saves, parameters and inputs of the call aside."""
    inputs = {item.node for item in local.program.inputs if item.kind is not InputKind.ARRIVING}
    nodes = {node.name: node for node in local.forward.graph.nodes}
    storages: dict[int, int] = {}
    for name in local.saved:
        if name in inputs or name not in nodes:
            continue
        storage = nodes[name].meta["val"].untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _gradient_bytes(local: LocalProgram) -> int:
    if local.backward is None:
        return 0
    gradients = [output for output in local.program.outputs if output.kind is OutputKind.GRADIENT]
    pairs = zip(gradients, results_of(local.backward.graph), strict=True)
    return sum(size_of(node) for output, node in pairs if node is not None and not output.is_between_stages)
