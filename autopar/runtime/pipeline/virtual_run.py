"""One training step of a pipeline with all its ranks in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.program import InputKind, OutputKind
from autopar.capture.trace import tensor_leaves
from autopar.runtime.memory_tracker import LockstepMemory
from autopar.runtime.pipeline.channels import Mailbox, VirtualLinks
from autopar.runtime.pipeline.gathered import OutputKey
from autopar.runtime.pipeline.lanes import Value, VirtualLanes
from autopar.runtime.pipeline.step import PipelineStep, early_values, whole_output
from autopar.runtime.pipeline.weights import Update, Weights
from autopar.runtime.pipeline.worker import Batch, Worker, drive
from autopar.runtime.tangents import varied_tangents
from autopar.runtime.virtual_run import VirtualRun
from autopar.schedules.actions import Action, halves
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
        self.given: dict[OutputKey, list[Value]] = {}  # outputs in full, on all ranks
        self.sums: dict[tuple[int, str], Value] = {}  # of gradients that stages share, by rank
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
                    hold = lanes.held_on_host if item.name in variants[0].hosted else lanes.held
                    self.weights[stage, item.name] = self._held_already(stage, item.name) or hold(
                        lanes.laid_out(parameters[item.name].detach(), variants[0].input_layout(item.node))
                    )

    def _held_already(self, stage: int, name: str) -> Value | None:
        """A parameter as another stage of the same rank has it."""
        rank_of = self.step.schedule.rank_of
        others = (
            value for (other, own), value in self.weights.items() if own == name and rank_of(other) == rank_of(stage)
        )
        return next(others, None)

    def batch(self, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int, tangents: Mapping[str, Tensor]) -> Batch:
        """The batch of a call."""
        inputs = {name: tensor.detach() for name, tensor in tensor_leaves(args, kwargs).items()}
        number = torch.tensor(seed, dtype=torch.int64)
        early = early_values(self.step.staged, inputs, self.buffers, number)
        return Batch({**inputs, **early}, dict(self.buffers), tangents, number)

    def run(self, batch: Batch) -> None:
        """Run the schedule."""
        mailbox, schedule = Mailbox(), self.step.schedule
        self.workers, self.given, self.sums = [], {}, {}
        self._hold_call(batch)
        for rank, lanes in enumerate(self.lanes):
            stages = {stage: self.variants[stage] for stage in schedule.stages_of(rank)}
            names = {stage: tuple(name for owner, name in self.weights if owner == stage) for stage in stages}
            weights = Weights(lambda stage, name: self.weights[stage, name], names, self.update)
            links = VirtualLinks(mailbox, lanes)
            self.workers.append(
                Worker(
                    rank,
                    self.step.staged,
                    schedule,
                    stages,
                    lanes,
                    links,
                    weights,
                    batch,
                    self.step.staged.given,
                    _copied,
                )
            )
        if self.step.staged.has_loss or not schedule.synchronous:
            self._drive(schedule.ranks)
        else:
            self._drive([halves(actions)[0] for actions in schedule.ranks])
            self._give_outputs()
            self._drive([halves(actions)[1] for actions in schedule.ranks])
        assert not mailbox.messages, f"never received: {sorted(map(str, mailbox.messages))}"
        self._sum_shared()
        self._send_staying()

    def _drive(self, lists: Sequence[Sequence[Action]]) -> None:
        drive({worker.rank: worker.run(lists[worker.rank]) for worker in self.workers})

    def _give_outputs(self) -> None:
        """Give every rank the outputs in full, which it has while the backwards run; parts of them are let go of."""
        for key in self.step.staged.given:
            full = self._full(*key)
            self.given[key] = [lanes.held([full.clone() for _ in lanes.geometries]) for lanes in self.lanes]
            for worker in self.workers:
                worker.gathered.outputs.pop(key, None)

    def _sum_shared(self) -> None:
        """Sum gradients of which several stages have a part: over those of a rank first, then over the ranks."""
        rank_of = self.step.schedule.rank_of
        for name, stages in self.step.staged.shared_gradients.items():
            own: dict[int, list[Value]] = {rank_of(stage): [] for stage in stages}
            for stage in stages:
                part = self.workers[rank_of(stage)].gathered.gradients.pop((stage, name), None)
                own[rank_of(stage)] += [] if part is None else [part]
            parts = {rank: reduce(self.lanes[rank].sum, own.pop(rank)) for rank in sorted(own) if own[rank]}
            sent = {rank: [lane.clone() for lane in part] for rank, part in parts.items()}
            for rank in sorted({rank_of(stage) for stage in stages}):
                self.sums[rank, name] = self._summed(rank, parts.pop(rank, None), sent)

    def _send_staying(self) -> None:
        """Gradients that stayed on the device go to the host: of each rank, the sum that it has."""
        for rank, name in list(self.sums):
            if any(name in self.variants[stage][0].staying for stage in self.step.schedule.stages_of(rank)):
                copy = [lane.clone() for lane in self.sums.pop((rank, name))]
                self.sums[rank, name] = self.lanes[rank].held_on_host(copy)

    def _summed(self, rank: int, part: Value | None, sent: Mapping[int, Value]) -> Value:
        """On one rank, the sum of its part and what others have sent, in the order of the ranks."""
        lanes = self.lanes[rank]
        parts = {other: lanes.held([lane.clone() for lane in value]) for other, value in sent.items() if other != rank}
        if part is None:
            part = lanes.held([torch.zeros_like(lane) for lane in next(iter(sent.values()))])
        parts[rank] = part
        return reduce(lanes.sum, [parts[it] for it in sorted(parts)])

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
        on_host = tuple(peak for lanes in self.lanes for peak in lanes.memory.host_peak_bytes)
        return VirtualRun(outputs, found[OutputKind.GRADIENT], found[OutputKind.BUFFER], peaks, on_host)

    def _full(self, kind: OutputKind, name: str) -> Tensor:
        staged, schedule = self.step.staged, self.step.schedule
        if (kind, name) in self.given:
            return self.given[kind, name][0][0]
        addends = []
        for stage in staged.homes[kind, name]:
            rank = schedule.rank_of(stage)
            gathered, lanes = self.workers[rank].gathered, self.lanes[rank]
            if kind is OutputKind.GRADIENT and (rank, name) in self.sums:
                parts = {0: self.sums[rank, name]}
                return whole_output(staged, self.variants[stage], lanes, (kind, name), parts)
            if (stage, name) in gathered.gradients and kind is OutputKind.GRADIENT:
                parts = {0: gathered.gradients[stage, name]}
            else:
                parts = gathered.outputs[kind, name]
            addends.append(whole_output(staged, self.variants[stage], lanes, (kind, name), parts))
        return reduce(torch.add, addends) if len(addends) > 1 else addends[0]


def _copied(value: Value) -> Value:
    """A copy of an output that real ranks let go of, outside of what is measured."""
    return [part.clone() for part in value]
