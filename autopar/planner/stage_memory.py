"""The memory of a pipeline stage as a few numbers: what an action takes, makes and leaves behind.

Schedules are chosen and checked with them. Of values that the stages of one rank share they count each stage's part;
`rank_memory` counts what a rank holds exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.capture.program import InputKind, OutputKind
from autopar.planner.graph_storages import GraphStorages
from autopar.planner.stage_storages import CALL, StageStorages
from autopar.schedules.memory import StageMemory
from autopar.stages.assign import size_of
from autopar.stages.staged import Staged

Storages = Mapping[int, int]  # bytes by identity


def call_bytes(staged: Staged) -> int:
    """What every rank holds of a call and of the model however many stages it has: whole inputs, buffers, constants,
    and what is computed of them before the first microbatch."""
    program, pieces = staged.program, staged.microbatches
    kinds = {item.node: item.kind for item in program.inputs}
    nodes = {node.name: node for node in program.graph_module.graph.nodes if node.op == "placeholder"}
    total = sum(size_of(node) for name, node in nodes.items() if kinds[name] in CALL)
    if pieces.early is not None:
        early = {node.name: node for node in program.graph_module.graph.nodes}
        total += sum(size_of(early[name]) for name in {value.node for value in pieces.early_values})
    return total * pieces.count if pieces.independent else total


def stage_memory(staged: Staged, stage: int, storages: StageStorages) -> StageMemory:
    """What one stage holds on its largest rank, without what the call brings; see `call_bytes`."""
    forward, saved_names = storages.forward, storages.graphs.local.saved
    count = len(forward.results)
    saved = forward.of_results(range(count - len(saved_names), count))
    sent, outputs = _beside(staged, storages, saved)
    common = {
        "fixed_bytes": sum(storages.fixed.values()),
        "version_bytes": sum(storages.weights.values()),
        "sent_bytes": sent,
        "output_bytes": outputs,
        "input_bytes": _received(staged, stage, storages, InputKind.ARRIVING),
    }
    if storages.graphs.backward is None:
        return StageMemory(**common, working={"forward": forward.alone_bytes})
    activation, of_inputs, urgent = max(1, sum(saved.values())), storages.of_inputs, storages.split.urgent
    kept = of_inputs.of_results(range(len(urgent), len(of_inputs.results)))
    given = of_inputs.of_results(range(len(urgent)))
    packed = sum(map(of_inputs.packing_bytes, range(len(urgent))))
    gradients = _gradients(storages)
    return StageMemory(
        **common,
        activation_bytes=activation,
        weight_share=sum(kept.values()) / activation,
        gradient_bytes=_received(staged, stage, storages, InputKind.TANGENT),
        sent_gradient_bytes=sum(given.values()) + packed,
        sent_beside_bytes=sum(_without(given, kept)) + packed,
        sum_bytes=sum(gradients),
        adding_bytes=max(gradients, default=0),
        reducing_bytes=max(gradients, default=0) if storages.graphs.deferred is not None else 0,
        working={
            "forward": forward.alone_bytes,
            "backward": storages.backward.alone_bytes,
            "backward_input": of_inputs.alone_bytes,
            "backward_weight": storages.of_weights.alone_bytes,
        },
    )


def _beside(staged: Staged, storages: StageStorages, saved: Storages) -> tuple[int, int]:
    """(bytes that the forward gives to other stages, bytes of its other results that are kept), beside what it saves.

    A value that does not lie contiguously is packed to be sent.
    """
    forward: GraphStorages = storages.forward
    numbers = {output: index for index, output in enumerate(storages.program.early_outputs)}
    leaving = [index for output, index in numbers.items() if output.kind is OutputKind.LEAVING]
    kept = [it for it in numbers if it.kind is OutputKind.BUFFER or (it.kind, it.name) in staged.given]
    others = [numbers[output] for output in kept]
    sent = sum(_without(forward.of_results(leaving), saved)) + sum(map(forward.packing_bytes, leaving))
    return sent, sum(_without(forward.of_results(others), saved))


def _gradients(storages: StageStorages) -> list[int]:
    """Bytes of each gradient of the weights."""
    backward = storages.backward
    own = [index for index, output in enumerate(storages.program.gradients) if not output.is_between_stages]
    return [sum(backward.of_results([index]).values()) for index in own]


def _received(staged: Staged, stage: int, storages: StageStorages, kind: InputKind) -> int:
    """Bytes of the largest message of one microbatch that the stage receives."""
    own = 1 if kind is InputKind.ARRIVING else 0
    edges = staged.first.activations if kind is InputKind.ARRIVING else staged.first.gradients
    messages = [names for edge, names in edges.items() if edge[own] == stage]
    return max((sum(storages.received.get((kind, name), 0) for name in names) for names in messages), default=0)


def _without(storages: Storages, others: Iterable[int]) -> list[int]:
    held = set(others)
    return [bytes_ for storage, bytes_ in storages.items() if storage not in held]
