"""Emitted programs of all ranks, run in lockstep on the values of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.capture.program import InputKind, OutputKind, Program
from autopar.passes.pipeline import LocalProgram, emit_ranks
from autopar.runtime.lockstep import Observer, run_lockstep
from autopar.sharding.assignment import Assignment
from autopar.sharding.execution import distribute, recombine, virtual_geometries


def emit_all(program: Program, assignment: Assignment) -> list[LocalProgram]:
    """Every rank's program."""
    return emit_ranks(program, assignment, virtual_geometries(assignment.mesh_shape))


@dataclass
class Step:
    """One forward and one backward of every rank."""

    model: nn.Module
    inputs: Sequence[Tensor]
    programs: list[LocalProgram]
    assignment: Assignment

    def run(self, observer: Observer | None = None) -> dict[tuple[OutputKind, str], Tensor]:
        """The full value of each output of the program; each gradient under its parameter's name."""
        program, ranks = self.programs[0].program, range(len(self.programs))
        values = self._shards()
        forward = [it.forward for it in self.programs]
        results = run_lockstep(
            forward, [[values[rank][name] for name in inputs_of(forward[rank])] for rank in ranks], observer
        )
        early = sum(output.kind is not OutputKind.GRADIENT for output in program.outputs)
        backward = [it.backward for it in self.programs if it.backward is not None]
        kept_from = early + len(self.programs[0].expert_counts)
        saved = [iter(result[kept_from:]) for result in results]
        given = [
            [values[rank][name] if name in self._tangents else next(saved[rank]) for name in inputs_of(backward[rank])]
            for rank in ranks
        ]
        outputs = [list(result[:early]) for result in results]
        del results, saved  # `values` stays, as a caller holds what it passes
        for output, gradients in zip(outputs, run_lockstep(backward, given, observer), strict=True):
            output.extend(gradients)
        return {
            (output.kind, output.name): recombine([it[index] for it in outputs], layout, self.assignment.mesh_shape)
            for index, (output, layout) in enumerate(zip(program.outputs, self.assignment.outputs, strict=True))
            if layout is not None
        }

    @property
    def _tangents(self) -> set[str]:
        return {item.node for item in self.programs[0].program.inputs if item.kind is InputKind.TANGENT}

    def _shards(self) -> list[dict[str, Tensor]]:
        """Per rank, the local value of every placeholder."""
        program, mesh_shape = self.programs[0].program, self.assignment.mesh_shape
        nodes = {node.name: node for node in program.graph_module.graph.nodes}
        state = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        inputs = iter(self.inputs)
        shards: list[dict[str, Tensor]] = [{} for _ in self.programs]
        for item in program.inputs:
            fake = nodes[item.node].meta["val"]
            if item.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                value = state[item.name].detach()
            elif item.kind is InputKind.INPUT:
                value = next(inputs)
            elif item.kind is InputKind.SEED:
                value = torch.zeros((), dtype=torch.int64)
            else:
                value = torch.ones(fake.shape, dtype=fake.dtype)
            for rank, part in enumerate(distribute(value, self.assignment.inputs[item.node], mesh_shape)):
                shards[rank][item.node] = part.clone()
        return shards


def inputs_of(gm: torch.fx.GraphModule) -> list[str]:
    """A graph's placeholders, in order."""
    return [node.name for node in gm.graph.nodes if node.op == "placeholder"]
