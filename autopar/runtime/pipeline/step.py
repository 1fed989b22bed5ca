"""A compiled pipeline: what to run for one kind of call, and what is worked out before its first microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import Partial

from autopar.capture.program import InputKind, OutputKind, Program
from autopar.passes.local_call import RankGeometry
from autopar.passes.pipeline import emit_ranks
from autopar.runtime.pipeline.lanes import Lanes, Value
from autopar.runtime.pipeline.stage import StageVariant
from autopar.runtime.strided import Strided
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
            lanes = tuple(emit_ranks(program, assignment, geometries))
            found.append(StageVariant(program, assignment, lanes, self.staged.microbatches.count))
        return tuple(found)

    @property
    def parameter_ranks(self) -> dict[str, int]:
        """By parameter that a stage reads, the first pipeline rank that holds it."""
        return {
            item.name: self.schedule.rank_of(stage.index)
            for stage in reversed(self.staged.stages)
            for item in stage.program.inputs
            if item.kind is InputKind.PARAMETER
        }


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
        results = Strided(graph).run(*(known[items[name].kind][items[name].name] for name in names))
    order = list(dict.fromkeys(value.node for value in staged.microbatches.early_values))
    by_node = dict(zip(order, results, strict=True))
    return {value.name: by_node[value.node] for value in staged.microbatches.early_values}


def whole_output(
    staged: Staged,
    variants: Sequence[StageVariant],
    lanes: Lanes,
    key: tuple[OutputKind, str],
    parts: Mapping[int, Value],
) -> Tensor:
    """An output of one stage, in full, from those of the microbatches. With real ranks, all of the stage take part."""
    full = {}
    for item, value in parts.items():
        variant = variants[staged.variant_of[item]]
        output = next(it for it in variant.program.outputs if (it.kind, it.name) == key)
        full[item] = lanes.full(value, variant.output_layouts[output], variant.output_shapes[output])
    return _joined(staged, key, full)


def whole_shape(staged: Staged, key: tuple[OutputKind, str], shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of an output of the call, from that of the program's, which may be of one microbatch."""
    dim = shard_dim(staged.over_time[key])
    if dim is None or not staged.microbatches.independent:
        return tuple(shape)
    return (*shape[:dim], shape[dim] * staged.microbatches.count, *shape[dim + 1 :])


def _joined(staged: Staged, key: tuple[OutputKind, str], parts: Mapping[int, Tensor]) -> Tensor:
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
