"""One training step of a pipeline with all its ranks in one process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.program import InputKind, OutputKind
from autopar.capture.trace import tensor_leaves
from autopar.runtime.memory_tracker import LockstepMemory
from autopar.runtime.pipeline.channels import Mailbox, VirtualLinks
from autopar.runtime.pipeline.lanes import Value, VirtualLanes
from autopar.runtime.pipeline.step import PipelineStep, early_values, whole_output
from autopar.runtime.pipeline.weights import Update, Weights
from autopar.runtime.pipeline.worker import Batch, Worker, drive
from autopar.runtime.tangents import varied_tangents
from autopar.runtime.virtual_run import VirtualRun
from autopar.sharding.execution import virtual_geometries


def run_virtual_pipeline(
    model: nn.Module,
    step: PipelineStep,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    seed: int,
    tangents: Mapping[str, Tensor] | None = None,
) -> VirtualRun:
    """Run all microbatches of a call through all stages, forward and backward, on every rank of a virtual mesh."""
    pipeline = VirtualPipeline(model, step)
    given = {**varied_tangents(step.staged.program), **(tangents or {})}
    with torch.no_grad():
        pipeline.run(pipeline.batch(args, kwargs, seed, given))
        return pipeline.result()


class VirtualPipeline:
    """The workers of all pipeline ranks, each with all ranks of its stages; the weights stay from batch to batch."""

    def __init__(self, model: nn.Module, step: PipelineStep, update: Update | None = None) -> None:
        self.model, self.step, self.update = model, step, update
        self.buffers = {name: buffer.detach() for name, buffer in model.named_buffers()}
        parameters = dict(model.named_parameters())
        self.weights: dict[tuple[int, str], Value] = {}
        self.lanes: list[VirtualLanes] = []
        self.workers: list[Worker] = []
        geometries = virtual_geometries(step.assignments[0].mesh_shape)
        self.variants = [step.variants(stage, geometries) for stage in range(len(step.assignments))]
        for _ in step.schedule.ranks:
            self.lanes.append(VirtualLanes(tuple(geometries), LockstepMemory(len(geometries))))
        for stage, variants in enumerate(self.variants):
            lanes = self.lanes[step.schedule.rank_of(stage)]
            for item in variants[0].program.inputs:
                if item.kind is InputKind.PARAMETER:
                    layout = variants[0].input_layout(item.node)
                    value = lanes.laid_out(parameters[item.name].detach(), layout)
                    self.weights[stage, item.name] = value
                    for tracker, part in zip(lanes.memory.trackers, value, strict=True):
                        tracker.hold([part])

    def batch(self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int, tangents: Mapping[str, Tensor]) -> Batch:
        """The batch of a call."""
        inputs = {name: tensor.detach() for name, tensor in tensor_leaves(args, kwargs).items()}
        number = torch.tensor(seed, dtype=torch.int64)
        early = early_values(self.step.staged, inputs, self.buffers, number)
        return Batch({**inputs, **early}, dict(self.buffers), tangents, number)

    def run(self, batch: Batch) -> None:
        """Run the schedule."""
        mailbox, schedule = Mailbox(), self.step.schedule
        self.workers = []
        self._hold_call(batch)
        for rank, lanes in enumerate(self.lanes):
            stages = {stage: self.variants[stage] for stage in schedule.stages_of(rank)}
            names = {stage: tuple(name for owner, name in self.weights if owner == stage) for stage in stages}
            weights = Weights(lambda stage, name: self.weights[stage, name], names, self.update)
            links = VirtualLinks(mailbox, lanes.memory)
            self.workers.append(Worker(rank, self.step.staged, schedule, stages, lanes, links, weights, batch))
        drive({worker.rank: worker.run(schedule.ranks[worker.rank]) for worker in self.workers})
        assert not mailbox.messages, f"never received: {sorted(map(str, mailbox.messages))}"

    def _hold_call(self, batch: Batch) -> None:
        """Count what every rank has of a call, in full."""
        whole = [*batch.inputs.values(), *batch.buffers.values(), *batch.tangents.values()]
        for lanes in self.lanes:
            for tracker in lanes.memory.trackers:
                tracker.hold(whole)

    def result(self) -> VirtualRun:
        """Outputs, gradients and buffers of the last run, in full."""
        found: dict[OutputKind, dict[str, Tensor]] = {kind: {} for kind in OutputKind}
        for output in self.step.staged.program.outputs:
            found[output.kind][output.name] = self._full(output.kind, output.name)
        outputs = {**found[OutputKind.LOSS], **found[OutputKind.OUTPUT]}
        peaks = tuple(peak for lanes in self.lanes for peak in lanes.memory.peak_bytes)
        return VirtualRun(outputs, found[OutputKind.GRADIENT], found[OutputKind.BUFFER], peaks)

    def _full(self, kind: OutputKind, name: str) -> Tensor:
        staged, schedule = self.step.staged, self.step.schedule
        addends = []
        for stage in staged.homes[kind, name]:
            rank = schedule.rank_of(stage)
            gathered, lanes = self.workers[rank].gathered, self.lanes[rank]
            if (stage, name) in gathered.gradients and kind is OutputKind.GRADIENT:
                parts = {0: gathered.gradients[stage, name]}
            else:
                parts = gathered.outputs[kind, name]
            addends.append(whole_output(staged, self.variants[stage], lanes, (kind, name), parts))
        return reduce(torch.add, addends) if len(addends) > 1 else addends[0]
