"""The memory of a pipeline stage, action by action, from its emitted graphs: what each takes, makes and leaves behind.

The rules are those of `liveness`: a value lives to its last reader, a storage as long as any value on it. What other
actions hold anyway (weights, and inputs of the call of which a microbatch's part is a view) counts once, as fixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, fx
from torch.distributed.tensor import Shard

from autopar.capture.program import InputKind, OutputKind, results_of
from autopar.passes.collectives import collective_kind, is_wait
from autopar.passes.copies import OFFLOAD
from autopar.passes.defer_reductions import defer_reductions
from autopar.passes.pipeline import LocalProgram
from autopar.passes.split_weights import split_weights
from autopar.passes.storages import storages_of
from autopar.planner.make import Planned
from autopar.schedules.memory import StageMemory
from autopar.sharding.layout import REPLICATE
from autopar.stages.assign import size_of
from autopar.stages.stage_programs import is_boundary
from autopar.stages.staged import Staged

Storages = dict[int, int]  # bytes by identity
CALL = (InputKind.INPUT, InputKind.BUFFER, InputKind.CONSTANT, InputKind.TANGENT)


def stage_memory(staged: Staged, stage: int, planned: Planned) -> StageMemory:
    """What one stage holds on its largest rank, without what the call brings; see `call_bytes`."""
    return _StageMemory(staged, stage, planned).found()


def microbatch_backward(local: LocalProgram, microbatches: int) -> tuple[fx.GraphModule | None, fx.GraphModule | None]:
    """(what a stage runs backward for each microbatch, what it sums over its ranks once for all)."""
    cut = defer_reductions(local.backward, local.program) if local.backward is not None and microbatches > 1 else None
    return (local.backward, None) if cut is None else (cut.of_microbatch, cut.of_step)


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


@dataclass(frozen=True)
class _Touched:
    """Of a graph: the bytes at its peak, and the storages of each result."""

    peak_bytes: int
    results: tuple[Storages, ...]


class _StageMemory:
    def __init__(self, staged: Staged, stage: int, planned: Planned) -> None:
        self.staged, self.stage, self.planned, self.local = staged, stage, planned, planned.local
        self.program = self.local.program
        self.held_anyway = self._held_anyway()

    def found(self) -> StageMemory:
        local, memory = self.local, self.planned.plan.memory
        forward = self._touched(local.forward)
        saved = _union(forward.results[len(forward.results) - len(local.saved) :]) if local.saved else {}
        sent, outputs = self._beside(forward, saved)
        weights = memory.get("parameter", 0)
        common = {
            "fixed_bytes": weights + memory.get("optimizer_state", 0),
            "version_bytes": weights,
            "sent_bytes": sent,
            "output_bytes": outputs,
            "input_bytes": self._received("activation"),
        }
        backward, reductions = microbatch_backward(local, self.staged.microbatches.count)
        if backward is None:
            return StageMemory(**common, working={"forward": forward.peak_bytes})
        activation = max(1, sum(saved.values()))
        split = split_weights(backward, self.program)
        whole, of_inputs, of_weights = map(self._touched, (backward, split.of_inputs, split.of_weights))
        kept = _union(of_inputs.results[len(split.urgent) :])
        given = _union(of_inputs.results[: len(split.urgent)])
        packed = sum(map(_packed_bytes, results_of(split.of_inputs.graph)[: len(split.urgent)]))
        gradients = self._gradients(whole)
        return StageMemory(
            **common,
            activation_bytes=activation,
            weight_share=sum(kept.values()) / activation,
            gradient_bytes=self._received("gradient"),
            sent_gradient_bytes=sum(given.values()) + packed,
            sent_beside_bytes=sum(_without(given, kept).values()) + packed,
            sum_bytes=sum(gradients),
            adding_bytes=max(gradients, default=0),
            reducing_bytes=max(gradients, default=0) if reductions is not None else 0,
            working={
                "forward": forward.peak_bytes,
                "backward": whole.peak_bytes,
                "backward_input": of_inputs.peak_bytes,
                "backward_weight": of_weights.peak_bytes,
            },
        )

    def _held_anyway(self) -> set[int]:
        """Storages of weights, of what is on the host, and of inputs of which a rank's part is a view of the whole."""
        layouts, over_time = self.planned.assignment.inputs, self.staged.microbatches.inputs
        found: set[int] = set()
        kinds = {item.node: item.kind for item in self.program.inputs if not is_boundary(item.name)}
        for node in self.local.joint.graph.nodes:
            kind = kinds.get(node.name) if node.op == "placeholder" else None
            viewed = over_time.get(node.name, REPLICATE) in (REPLICATE, Shard(0)) and not _packed_bytes(node)
            whole = all(placement == REPLICATE for placement in layouts.get(node.name, ()))
            if kind is InputKind.PARAMETER or (kind in CALL and viewed and whole) or node.target is OFFLOAD:
                found |= storages_of(node).keys()
        return found

    def _touched(self, gm: fx.GraphModule) -> _Touched:
        nodes = [node for node in gm.graph.nodes if node.op != "output"]
        known = {node: _without(storages_of(node), self.held_anyway) for node in nodes}
        sizes, first, last = Storages(), dict[int, int](), dict[int, int]()
        for index, node in enumerate(nodes):
            for storage, bytes_ in known[node].items():
                sizes.setdefault(storage, bytes_)
                first.setdefault(storage, 0 if node.op == "placeholder" else index)
            readers = [node, *node.all_input_nodes]
            if is_wait(node) and collective_kind(node.all_input_nodes[0]) != "all_reduce":
                readers += node.all_input_nodes[0].all_input_nodes  # a process group holds it until the wait
            for source in readers:
                last.update(dict.fromkeys(known[source], index))
        results = tuple(known[node] if node is not None else {} for node in results_of(gm.graph))
        last.update(dict.fromkeys(_union(results), len(nodes) - 1))
        changes = [0] * (len(nodes) + 1)
        for storage, bytes_ in sizes.items():
            changes[first[storage]] += bytes_
            changes[last[storage] + 1] -= bytes_
        return _Touched(_highest(changes), results)

    def _beside(self, forward: _Touched, saved: Mapping[int, int]) -> tuple[int, int]:
        """(bytes that the forward gives to other stages, bytes of its other results), beside what it saves.

        A value that does not lie contiguously is packed to be sent.
        """
        early = [output for output in self.program.outputs if output.kind is not OutputKind.GRADIENT]
        nodes = results_of(self.local.forward.graph)
        sent, kept, packed = Storages(), Storages(), 0
        for output, storages, node in zip(early, forward.results, nodes, strict=False):
            if output.kind is OutputKind.LEAVING:
                sent.update(_without(storages, saved))
                packed += _packed_bytes(node)
            else:
                kept.update(_without(storages, saved))
        return sum(sent.values()) + packed, sum(kept.values())

    def _gradients(self, backward: _Touched) -> list[int]:
        """Bytes of each gradient of the weights."""
        gradients = [output for output in self.program.outputs if output.kind is OutputKind.GRADIENT]
        pairs = zip(gradients, backward.results, strict=True)
        return [sum(storages.values()) for output, storages in pairs if not output.is_between_stages]

    def _received(self, what: str) -> int:
        """Bytes of the largest message of one microbatch that the stage receives."""
        staged, own = self.staged.first, 1 if what == "activation" else 0
        edges = staged.activations if what == "activation" else staged.gradients
        kind = InputKind.ARRIVING if what == "activation" else InputKind.TANGENT
        local = {
            item.name: size_of(node)
            for item in self.program.inputs
            if item.kind is kind and (node := self._placeholder(item.node)) is not None
        }
        messages = [names for edge, names in edges.items() if edge[own] == self.stage]
        return max((sum(local.get(name, 0) for name in names) for names in messages), default=0)

    def _placeholder(self, name: str) -> fx.Node | None:
        nodes = self.local.joint.graph.nodes
        return next((node for node in nodes if node.op == "placeholder" and node.name == name), None)


def _union(parts: Iterable[Mapping[int, int]]) -> Storages:
    found = Storages()
    for part in parts:
        found.update(part)
    return found


def _without(storages: Mapping[int, int], others: Iterable[int]) -> Storages:
    return {storage: bytes_ for storage, bytes_ in storages.items() if storage not in others}


def _packed_bytes(node: fx.Node | None) -> int:
    value = None if node is None else node.meta.get("val")
    return 0 if not isinstance(value, Tensor) or value.is_contiguous() else value.numel() * value.element_size()


def _highest(changes: Iterable[int]) -> int:
    total = highest = 0
    for change in changes:
        total += change
        highest = max(highest, total)
    return highest
