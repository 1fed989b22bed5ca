"""One call of a pipeline on this rank: the schedule, then what all ranks are to have of its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.capture.program import OutputKind, Program
from autopar.passes.copy_experts import with_places
from autopar.passes.expert_places import ExpertPlaces
from autopar.passes.observed import ExpertCount
from autopar.runtime.experts.load import ExpertCounter
from autopar.runtime.pipeline.gathered import OutputKey
from autopar.runtime.pipeline.lanes import RealLane, Value
from autopar.runtime.pipeline.rank import PipelineRank
from autopar.runtime.pipeline.stage import StageVariant
from autopar.runtime.pipeline.step import PipelineStep, early_values, whole_output, whole_shape
from autopar.runtime.pipeline.weights import Update, Weights
from autopar.runtime.pipeline.worker import Batch, Worker
from autopar.runtime.step import geometry_of
from autopar.schedules.actions import Action
from autopar.sharding.dtensors import as_dtensor, host_copy

Variants = dict[int, tuple[StageVariant, ...]]  # by stage


@dataclass
class BoundPipeline:
    """A compiled pipeline on this rank: its stages, emitted; as planned, and with experts where they are.

    `replaced`: experts were moved since: calls that are not through cannot be finished.
    """

    step: PipelineStep
    place: PipelineRank
    planned: Variants = field(default_factory=dict)
    variants: Variants = field(default_factory=dict)
    replaced: bool = False
    copy_bytes: int = 0  # more than planned on this rank at the peak, with copies of experts

    def __post_init__(self) -> None:
        if not self.planned:
            geometry = geometry_of(self.place.stage_mesh)
            stages = self.step.schedule.stages_of(self.place.rank)
            self.planned = {stage: self.step.variants(stage, [geometry]) for stage in stages}
        self.variants = self.variants or self.planned
        self.lane = RealLane(self.place.stage_mesh)

    def with_places(self, places_of: Callable[[Program], Mapping[str, ExpertPlaces]]) -> BoundPipeline:
        """The same pipeline, once experts were moved: by layer of a stage's program, where they are."""

        def placed(variant: StageVariant) -> StageVariant:
            places = places_of(variant.program)
            return replace(variant, lanes=tuple(with_places(lane, places) for lane in variant.lanes))

        variants = {stage: tuple(map(placed, items)) for stage, items in self.planned.items()}
        return BoundPipeline(self.step, self.place, self.planned, variants)

    @property
    def actions(self) -> tuple[Action, ...]:
        return self.step.schedule.ranks[self.place.rank]

    @property
    def has_gradients(self) -> bool:
        return any(output.kind is OutputKind.GRADIENT for output in self.step.staged.program.outputs)

    @property
    def has_loss(self) -> bool:
        """Whether the backward starts from one scalar that the program computes."""
        return self.step.staged.has_loss

    def worker(
        self,
        inputs: Mapping[str, Tensor],
        parameters: Mapping[str, DTensor],
        buffers: Mapping[str, Tensor],
        seed: int,
        update: Update | None = None,
        counter: ExpertCounter | None = None,
        given: tuple[OutputKey, ...] | None = None,
    ) -> Worker:
        """What runs one call; `inputs` in full. `given`: the outputs that every rank gets; None for the usual ones."""
        step, device = self.step, self.place.mesh.device_type
        held = {name: tensor.detach().to(device) for name, tensor in inputs.items()}
        number = torch.tensor(seed, dtype=torch.int64, device=device)
        early = early_values(step.staged, held, buffers, number)

        def current(_: int, name: str) -> Value:
            return [parameters[name].to_local().detach()]

        names = {stage: parameter_names(variants[0]) for stage, variants in self.variants.items()}
        weights = Weights(current, names, update)
        tangents = self._ones()
        batch = Batch({**held, **early}, dict(buffers), tangents, number)
        links = self.place.links
        return Worker(
            self.place.rank, step.staged, step.schedule, self.variants, self.lane, links, weights, batch,
            step.staged.given if given is None else given, counter=counter,
        )  # fmt: skip

    @cached_property
    def hosted(self) -> frozenset[str]:
        """The parameters of this rank's stages that lie on the host."""
        return frozenset(name for variants in self.variants.values() for name in variants[0].hosted)

    @property
    def expert_counts(self) -> tuple[ExpertCount, ...]:
        """What the forwards of this rank's stages count."""
        variants = (variant for stage in self.variants.values() for variant in stage)
        return tuple(count for variant in variants for count in variant.lanes[0].expert_counts)

    def _ones(self) -> dict[str, Tensor]:
        """The gradient of the loss by itself."""
        device = self.place.mesh.device_type
        outputs = zip(self.step.staged.program.outputs, self.step.staged.program.results, strict=True)
        return {
            output.name: torch.ones((), dtype=node.meta["val"].dtype, device=device)
            for output, node in outputs
            if output.kind is OutputKind.LOSS
        }

    def follow(self, worker: Worker, actions: Iterable[Action]) -> None:
        """Run actions to their end, and wait for what was sent."""
        for _ in worker.run(actions):
            raise AssertionError("a real rank waits inside its channels")
        self.place.links.finish()

    def everywhere(self, worker: Worker, key: OutputKey) -> Tensor:
        """An output in full on every rank: computed by the ranks of its stage, given to those of the others. The
        worker lets go of its parts."""
        home = self.step.staged.homes[key][-1]
        rank = self.step.schedule.rank_of(home)
        program = self.step.staged.program
        found = zip(program.outputs, program.results, strict=True)
        fake = next(node.meta["val"] for output, node in found if (output.kind, output.name) == key)
        shape = whole_shape(self.step.staged, key, fake.shape)
        if rank == self.place.rank:
            full = self._full(worker, home, key).contiguous()
        else:
            full = torch.empty(shape, dtype=fake.dtype, device=self.place.mesh.device_type)
        return self.place.broadcast(full, rank) if len(self.place.line) > 1 else full

    def _full(self, worker: Worker, stage: int, key: OutputKey) -> Tensor:
        """An output of one of this rank's stages, of all microbatches, in full."""
        parts = worker.gathered.outputs.pop(key)
        return whole_output(self.step.staged, self.variants[stage], self.lane, key, parts)

    def parameter_gradients(self, worker: Worker) -> dict[str, DTensor]:
        """The gradients of this rank's parameters, as their DTensors; those that stages share are summed over them.

        The worker lets go of its own, so that nothing is held twice.
        """
        if self.hosted:
            self.lane.settle_host()
        own: dict[str, list[Tensor]] = {}
        for key in sorted(worker.gathered.gradients):
            own.setdefault(key[1], []).append(worker.gathered.gradients.pop(key)[0])
        sums = {name: reduce(torch.add, own.pop(name)) for name in list(own)}
        for name, ranks in self._holders().items():
            if self.place.rank in ranks:
                part = sums.pop(name) if name in sums else self._zeros(name)
                sums[name] = self.place.summed(name, part, ranks)
        gradients = {}
        for variants in self.variants.values():
            for item in variants[0].program.inputs:
                if item.name in sums and item.name not in gradients and item.node in variants[0].parameter_nodes:
                    layout, shape = variants[0].input_layout(item.node), variants[0].parameter_nodes[item.node]
                    local = sums[item.name].contiguous()
                    local = host_copy(local) if item.name in variants[0].staying else local
                    gradients[item.name] = as_dtensor(local, self.place.stage_mesh, layout, shape)
        return gradients

    def _holders(self) -> dict[str, tuple[int, ...]]:
        """By parameter whose gradient is summed over pipeline ranks, those ranks; in the order of its name."""
        shared, rank_of = sorted(self.step.staged.shared_gradients.items()), self.step.schedule.rank_of
        found = {name: tuple(sorted({rank_of(stage) for stage in stages})) for name, stages in shared}
        return {name: ranks for name, ranks in found.items() if len(ranks) > 1}

    def _zeros(self, name: str) -> Tensor:
        """The gradient of a shared parameter of this rank, whose stages here give none."""
        for variants in self.variants.values():
            for item in variants[0].program.inputs:
                if item.name == name and item.node in variants[0].parameter_nodes:
                    fake = variants[0].local_value(item.node)  # zeros like it would be fake too, and never arrive
                    return torch.zeros(fake.shape, dtype=fake.dtype, device=self.place.mesh.device_type)
        raise AssertionError(f"{name} is not on this rank")


def parameter_names(variant: StageVariant) -> tuple[str, ...]:
    """The parameters of a stage."""
    nodes = variant.parameter_nodes
    return tuple(item.name for item in variant.program.inputs if item.node in nodes)
