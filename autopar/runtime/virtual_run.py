"""One training step of all ranks in one process: emit for each, run in lockstep, put the results together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.capture.program import InputKind, OutputKind, Program
from autopar.capture.trace import tensor_leaves
from autopar.passes.pipeline import LocalProgram, emit_ranks
from autopar.runtime.lockstep import run_lockstep
from autopar.runtime.memory_tracker import LockstepMemory
from autopar.runtime.tangents import varied_tangents
from autopar.sharding.assignment import Assignment
from autopar.sharding.execution import distribute, recombine, virtual_geometries


@dataclass(frozen=True)
class VirtualRun:
    """What one step of all ranks gave: full tensors by name, and each rank's peak of live bytes."""

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]  # the new values of those that the step changed
    peak_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...] = ()  # the most that each rank held on the host


def run_virtual_step(
    model: nn.Module,
    program: Program,
    assignment: Assignment,
    mesh_shape: Sequence[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    seed: int,
    tangents: Mapping[str, Tensor] | None = None,
) -> VirtualRun:
    """Run forward and backward of an assigned program on every rank of a virtual mesh.

    `tangents` by output name, `varied_tangents` where none are given. Replicas that come out different raise an
    AssertionError.
    """
    shape = tuple(mesh_shape)
    ranks = emit_ranks(program, assignment, virtual_geometries(shape))
    step = _VirtualStep(program, assignment, shape, ranks)
    given = {**varied_tangents(program), **(tangents or {})}
    values = program_values(model, program, tensor_leaves(args, kwargs), seed, given)
    with torch.no_grad():
        return step.run(values)


def program_values(
    model: nn.Module, program: Program, inputs: Mapping[str, Tensor], seed: int, tangents: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The full value of every placeholder of a program, by node name."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    named: dict[InputKind, Mapping[str, Tensor]] = {
        InputKind.PARAMETER: state,
        InputKind.BUFFER: state,
        InputKind.INPUT: inputs,
        InputKind.CONSTANT: program.constants,
        InputKind.TANGENT: tangents,
        InputKind.SEED: {"seed": torch.tensor(seed, dtype=torch.int64)},
    }
    return {item.node: named[item.kind][item.name].detach() for item in program.inputs}


@dataclass(frozen=True)
class _VirtualStep:
    """The emitted graphs of all ranks, and the layouts at their edges."""

    program: Program
    assignment: Assignment
    mesh_shape: tuple[int, ...]
    ranks: list[LocalProgram]

    def run(self, values: Mapping[str, Tensor]) -> VirtualRun:
        memory = LockstepMemory(len(self.ranks))
        kinds = [output.kind for output in self.program.outputs]
        early = len(kinds) - kinds.count(OutputKind.GRADIENT)
        forward = [rank.forward for rank in self.ranks]
        inputs = self._inputs(forward, values, [[] for _ in self.ranks])
        kept = [tuple(rank) for rank in inputs]  # parameters, buffers and the batch live on beside the graphs
        on_host = self._on_host(forward[0])
        for tracker, held in zip(memory.trackers, kept, strict=True):
            tracker.hold([value for value, away in zip(held, on_host, strict=True) if away], on_host=True)
            tracker.hold(held)
        first = run_lockstep(forward, inputs, memory)
        kept_from = early + len(self.ranks[0].expert_counts)
        results, saved = [list(rank[:early]) for rank in first], [list(rank[kept_from:]) for rank in first]
        del first
        backward = [rank.backward for rank in self.ranks if rank.backward is not None]
        if backward:
            count = len(saved[0])
            inputs = self._inputs(backward, values, saved)
            kept += [tuple(rank[count:]) for rank in inputs]  # autograd holds the tangents
            second = run_lockstep(backward, inputs, memory)
            results = [[*rank, *gradients] for rank, gradients in zip(results, second, strict=True)]
        return replace(self._recombined(results, memory.peak_bytes), host_bytes=memory.host_peak_bytes)

    def _inputs(
        self, graphs: Sequence[fx.GraphModule], values: Mapping[str, Tensor], saved: Sequence[list[Tensor]]
    ) -> list[list[Tensor]]:
        """Each rank's inputs: what it saved (its list is emptied), then its own shards of the other placeholders."""
        names = [node.name for node in graphs[0].graph.nodes if node.op == "placeholder"][len(saved[0]) :]
        shards = [distribute(values[name], self.assignment.inputs[name], self.mesh_shape) for name in names]
        inputs = [[*kept, *(shard[rank].clone() for shard in shards)] for rank, kept in enumerate(saved)]
        for kept in saved:
            kept.clear()
        return inputs

    def _on_host(self, gm: fx.GraphModule) -> list[bool]:
        """Which inputs of a graph lie on the host."""
        return [node.name in self.assignment.hosted for node in gm.graph.nodes if node.op == "placeholder"]

    def _recombined(self, results: Sequence[Sequence[Tensor]], peak_bytes: tuple[int, ...]) -> VirtualRun:
        found: dict[OutputKind, dict[str, Tensor]] = {kind: {} for kind in OutputKind}
        for index, (output, node) in enumerate(zip(self.program.outputs, self.program.results, strict=True)):
            layout = self.assignment.outputs[index]
            layout = self.assignment.layout_of(node) if layout is None else layout
            found[output.kind][output.name] = recombine([rank[index] for rank in results], layout, self.mesh_shape)
        outputs = {**found[OutputKind.LOSS], **found[OutputKind.OUTPUT]}
        return VirtualRun(outputs, found[OutputKind.GRADIENT], found[OutputKind.BUFFER], peak_bytes)
