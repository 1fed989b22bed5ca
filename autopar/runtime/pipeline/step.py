"""A compiled pipeline: what to run for one kind of call, and what is worked out before its first microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Partial

from autopar.capture.program import InputKind, OutputKind, Program
from autopar.passes.local_call import RankGeometry
from autopar.passes.pipeline import emit_ranks
from autopar.runtime.pipeline.stage import StageVariant
from autopar.schedules.actions import Schedule
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout import shard_dim
from autopar.stages.staged import Staged


@dataclass(frozen=True)
class PipelineStep:
    """One program in stages under one plan. `assignments`: by stage, on the mesh of one stage; `axis`: of the whole
    mesh, along which the stages lie."""

    staged: Staged
    schedule: Schedule
    assignments: tuple[Assignment, ...]
    axis: int

    def variants(self, stage: int, geometries: Sequence[RankGeometry]) -> tuple[StageVariant, ...]:
        """A stage's programs for each distinct microbatch, emitted for these ranks."""
        assignment = self.assignments[stage]
        found = []
        for variant in self.staged.variants:
            program = variant.stages[stage].program
            found.append(StageVariant(program, assignment, tuple(emit_ranks(program, assignment, geometries))))
        return tuple(found)


def early_values(
    staged: Staged, inputs: Mapping[str, Tensor], buffers: Mapping[str, Tensor], seed: Tensor
) -> dict[str, Tensor]:
    """By name, the inputs of microbatches that are computed from the whole call."""
    graph = staged.microbatches.early
    if graph is None:
        return {}
    known: Mapping[InputKind, Mapping[str, Tensor]] = {
        InputKind.INPUT: inputs,
        InputKind.BUFFER: buffers,
        InputKind.CONSTANT: staged.program.constants,
        InputKind.SEED: {"seed": seed},
    }
    items = {item.node: item for item in staged.program.inputs}
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        results = _Strided(graph).run(*(known[items[name].kind][items[name].name] for name in names))
    order = list(dict.fromkeys(value.node for value in staged.microbatches.early_values))
    by_node = dict(zip(order, results, strict=True))
    return {value.name: by_node[value.node] for value in staged.microbatches.early_values}


class _Strided(fx.Interpreter):
    """Runs a graph on tensors whose strides may differ from those of its fake ones: views then copy."""

    def call_function(self, target: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        aten = torch.ops.aten
        return super().call_function(aten.reshape.default if target is aten.view.default else target, args, kwargs)  # type: ignore[arg-type]


def joined(staged: Staged, key: tuple[OutputKind, str], parts: Mapping[int, Tensor]) -> Tensor:
    """An output of the whole batch from those of the microbatches."""
    placement = staged.over_time[key]
    values = [parts[item] for item in sorted(parts)]
    dim = shard_dim(placement)
    if dim is not None:
        return torch.cat(values, dim)
    assert isinstance(placement, Partial) or len(values) == 1
    return values[0]


def user_outputs(program: Program) -> list[tuple[OutputKind, str]]:
    """The keys of what the user gets, in order."""
    kinds = (OutputKind.LOSS, OutputKind.OUTPUT)
    return [(output.kind, output.name) for output in program.outputs if output.kind in kinds]
