"""One pipeline rank at work: it follows its list of actions with the stages that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import Partial

from autopar.capture.program import BETWEEN_STAGES, InputKind, OutputKind, ProgramOutput
from autopar.runtime.experts.load import ExpertCounter
from autopar.runtime.pipeline.channels import Channels, Incoming, Message
from autopar.runtime.pipeline.gathered import Gathered, OutputKey
from autopar.runtime.pipeline.lanes import Lanes, Value
from autopar.runtime.pipeline.stage import StageVariant
from autopar.runtime.pipeline.weights import Weights
from autopar.schedules.actions import Action, Schedule
from autopar.sharding.layout import shard_dim
from autopar.stages.microbatch import part_of
from autopar.stages.staged import Staged


@dataclass(frozen=True)
class Batch:
    """What one call brings, whole: by name, its inputs with the early values among them; by output, its tangents."""

    inputs: Mapping[str, Tensor]
    buffers: dict[str, Tensor]
    tangents: Mapping[str, Tensor]
    seed: Tensor


def let_go(_value: Value) -> None:
    """Nothing is kept."""


def untimed(_kind: str, _stage: int, _microbatch: int) -> AbstractContextManager[None]:
    """No clock is read."""
    return nullcontext()


@dataclass
class Worker:
    """Runs the actions of pipeline rank `rank`. `stages`: by number and variant, those that the rank has."""

    rank: int
    staged: Staged
    schedule: Schedule
    stages: Mapping[int, tuple[StageVariant, ...]]
    lanes: Lanes
    channels: Channels
    weights: Weights
    batch: Batch
    given: tuple[OutputKey, ...] = ()  # the outputs that somebody is given in the end
    aside: Callable[[Value], Value | None] = let_go  # what is kept of the others
    counter: ExpertCounter | None = None  # of the tokens that chose each expert, where somebody asks
    gathered: Gathered = field(default_factory=Gathered)
    arrived: dict[tuple[int, InputKind, str, int], Value] = field(default_factory=dict)
    leaving: dict[Message, list[Value]] = field(default_factory=dict)
    incoming: dict[Message, Incoming] = field(default_factory=dict)
    saved: dict[tuple[int, int], dict[str, Value]] = field(default_factory=dict)
    kept: dict[tuple[int, int], dict[str, Value]] = field(default_factory=dict)  # for the weights' gradients
    added: dict[int, int] = field(default_factory=dict)  # microbatches in each stage's gradients
    timed: Callable[[str, int, int], AbstractContextManager[None]] = untimed  # around what computes, sends and waits

    def run(self, actions: Iterable[Action]) -> Iterator[None]:
        """Follow the actions; yields where a message must be sent by another worker of this process first."""
        for action in actions:
            yield from self._do(action)

    def _do(self, action: Action) -> Iterator[None]:
        stage, item = action.stage, action.microbatch
        match action.kind:
            case "forward":
                yield from self._take(stage, item, "activation")
                with self.timed(action.kind, stage, item):
                    self._forward(stage, item)
                self.weights.ran(stage)
            case "backward" | "backward_input":
                yield from self._take(stage, item, "gradient")
                with self.timed(action.kind, stage, item):
                    self._backward(stage, item, whole=action.kind == "backward")
                self.weights.ran(stage)
                self._count(action)
            case "backward_weight":
                with self.timed(action.kind, stage, item):
                    self._backward_weight(stage, item)
                self.weights.ran(stage)
                self._count(action)
            case "send_activation" | "send_gradient":
                self._send(Message(_what(action), stage, action.peer, item))
            case "recv_activation" | "recv_gradient":
                self._receive(Message(_what(action), action.peer, stage, item))
            case _:
                self.weights.act(action, self.gathered)

    def _count(self, action: Action) -> None:
        """Sum gradients over the ranks of their stage once the last microbatch before an update is in them."""
        if action.kind == "backward_input":
            return
        stage, count = action.stage, self.added.get(action.stage, 0) + 1
        self.added[stage] = count
        if count % (self.schedule.update_every or self.schedule.microbatches) == 0:
            self._reduce(stage)

    def _reduce(self, stage: int) -> None:
        variant = self.stages[stage][0]
        if not variant.deferred:
            return
        numbers = variant.deferred[0].numbers
        keys = [(stage, variant.program.gradients[number].name) for number in numbers]
        inputs = _by_lane([self.gathered.gradients.pop(key) for key in keys], len(variant.lanes))
        results = self.lanes.run([cut.of_step for cut in variant.deferred], inputs)
        for index, key in enumerate(keys):
            self.gathered.gradients[key] = [lane[index] for lane in results]
            self.gathered.owned.discard(key)

    def _names(self, message: Message) -> tuple[str, ...]:
        ends = sorted((message.source, message.reader))
        crossing = self.staged.first.activations if message.kind == "activation" else self.staged.first.gradients
        return crossing.get((ends[0], ends[1]), ())

    def _send(self, message: Message) -> None:
        if self._names(message):
            reader = self.schedule.rank_of(message.reader)
            with self.timed(f"send_{message.kind}", message.source, message.microbatch):
                self.channels.send(message, reader, self.leaving.pop(message))

    def _receive(self, message: Message) -> None:
        kind = InputKind.ARRIVING if message.kind == "activation" else InputKind.TANGENT
        variant = self._variant(message.reader, message.microbatch)
        names = self._names(message)
        if names:
            like = [[variant.received(lane, kind, name) for lane in range(len(variant.lanes))] for name in names]
            source = self.schedule.rank_of(message.source)
            self.incoming[message] = self.channels.receive(message, source, like)

    def _take(self, stage: int, item: int, what: str) -> Iterator[None]:
        """Wait for what was asked for, for one action."""
        kind = InputKind.ARRIVING if what == "activation" else InputKind.TANGENT
        for message in [it for it in self.incoming if (it.kind, it.reader, it.microbatch) == (what, stage, item)]:
            incoming = self.incoming.pop(message)
            while not incoming.is_here():
                yield
            with self.timed(f"recv_{what}", stage, item):
                values = incoming.values()
            for name, value in zip(self._names(message), values, strict=True):
                self.arrived[stage, kind, name, item] = value

    def _give(self, what: str, stage: int, item: int, values: Mapping[str, Value]) -> None:
        """Hand a stage's values on to its readers: those of this rank at once, others with a later send."""
        kind = InputKind.ARRIVING if what == "activation" else InputKind.TANGENT
        edges = self.staged.first.activations if what == "activation" else self.staged.first.gradients
        for (earlier, later), names in edges.items():
            source, reader = (earlier, later) if what == "activation" else (later, earlier)
            if source != stage:
                continue
            if self.schedule.rank_of(reader) == self.rank:
                for name in names:
                    self.arrived[reader, kind, name, item] = values[name]
            else:
                self.leaving[Message(what, stage, reader, item)] = [values[name] for name in names]

    def _variant(self, stage: int, item: int) -> StageVariant:
        return self.stages[stage][self.staged.variant_of[item]]

    def _forward(self, stage: int, item: int) -> None:
        variant = self._variant(stage, item)
        values = [self._bound(variant, stage, node, item) for node in variant.forward_names]
        inputs = _by_lane(values, len(variant.lanes))
        del values  # the graph lets go of what it was given
        results = self.lanes.run(variant.forward, inputs)
        what, early = variant.lanes[0].expert_counts, len(variant.program.early_outputs)
        count = early + len(what)
        if self.counter is not None:
            self.counter.add(what, results[0][early:count])
        leaving: dict[str, Value] = {}
        for index, output in enumerate(variant.program.early_outputs):
            value = [lane[index] for lane in results]
            if output.kind is OutputKind.LEAVING:
                leaving[output.name] = value
            else:
                self._note_output(output, item, value)
        names = variant.lanes[0].saved
        saved = {name: [lane[count + index] for lane in results] for index, name in enumerate(names)}
        self.saved[stage, item] = _without_weights(variant, saved)
        self._give("activation", stage, item, leaving)

    def _note_output(self, output: ProgramOutput, item: int, value: Value) -> None:
        placement = self.staged.over_time[output.kind, output.name]
        aside = output.kind is OutputKind.OUTPUT and (output.kind, output.name) not in self.given
        if aside:
            kept = self.aside(value)
            if kept is None:
                return
            value = kept
        if output.kind is OutputKind.BUFFER and self.staged.microbatches.independent:
            self.batch.buffers[output.name] = value[0]
        held = self.gathered.outputs[output.kind, output.name]
        if isinstance(placement, Partial) and held:
            ((first, total),) = held.items()
            added = [torch.add(*parts) for parts in zip(total, value, strict=True)] if aside else None  # not measured
            held[first] = added or self.lanes.sum(total, value)
        elif shard_dim(placement) is not None or item == 0 or isinstance(placement, Partial):
            held[item] = value
        elif self.staged.microbatches.independent:
            self.gathered.outputs[output.kind, output.name] = {item: value}

    def _bound(self, variant: StageVariant, stage: int, node: str, item: int) -> Value:
        """The value of a placeholder for one microbatch."""
        given = variant.inputs[node]
        lanes = len(variant.lanes)
        if given.kind is InputKind.PARAMETER:
            return self.weights.of(stage, given.name)
        if given.kind is InputKind.ARRIVING or given.name.startswith(BETWEEN_STAGES):
            return self.arrived.pop((stage, given.kind, given.name, item))
        if given.kind is InputKind.SEED:
            offset = item if self.staged.microbatches.independent else 0
            return [self.batch.seed + offset] * lanes
        known: Mapping[InputKind, Mapping[str, Tensor]] = {
            InputKind.BUFFER: self.batch.buffers,
            InputKind.INPUT: self.batch.inputs,
            InputKind.CONSTANT: variant.program.constants,
            InputKind.TANGENT: self.batch.tangents,
        }
        whole = known[given.kind][given.name]
        microbatches = self.staged.microbatches
        part = part_of(whole, microbatches.inputs[node], microbatches.cut, item)
        return self.lanes.laid_out(part, variant.input_layout(node))

    def _backward(self, stage: int, item: int, *, whole: bool) -> None:
        variant = self._variant(stage, item)
        saved = self.saved.pop((stage, item))
        if not variant.backward:
            return
        names = variant.backward_names
        values = [saved.pop(node) if node in saved else self._bound(variant, stage, node, item) for node in names]
        inputs = _by_lane(values, len(variant.lanes))
        del values
        if whole:
            results = self.lanes.run(variant.backward, inputs)
            self._deliver(variant, stage, item, dict(enumerate(zip(*results, strict=True))))
            return
        split = variant.split
        results = self.lanes.run([lane.of_inputs for lane in split], inputs)
        urgent = split[0].urgent
        self._deliver(variant, stage, item, {index: [lane[at] for lane in results] for at, index in enumerate(urgent)})
        kept = {name: [lane[len(urgent) + at] for lane in results] for at, name in enumerate(split[0].kept)}
        self.kept[stage, item] = _without_weights(variant, kept)

    def _backward_weight(self, stage: int, item: int) -> None:
        variant = self._variant(stage, item)
        kept = self.kept.pop((stage, item), None)
        if kept is None:
            return
        split = variant.split
        values = [kept.pop(name) if name in kept else self._bound(variant, stage, name, item) for name in split[0].kept]
        inputs = _by_lane(values, len(variant.lanes))
        del values
        results = self.lanes.run([lane.of_weights for lane in split], inputs)
        others = [index for index in range(len(variant.program.gradients)) if index not in split[0].urgent]
        self._deliver(variant, stage, item, {index: [lane[at] for lane in results] for at, index in enumerate(others)})

    def _deliver(self, variant: StageVariant, stage: int, item: int, values: Mapping[int, Iterable[Tensor]]) -> None:
        """Hand gradients on to other stages, or add them to those of earlier microbatches."""
        between: dict[str, Value] = {}
        for index, lanes in values.items():
            output, value = variant.program.gradients[index], list(lanes)
            if output.is_between_stages:
                between[output.name] = value
                continue
            placement = self.staged.over_time[output.kind, output.name]
            if shard_dim(placement) is not None:
                self.gathered.outputs[output.kind, output.name][item] = value
            elif isinstance(placement, Partial) or item == 0:
                self._add(variant, stage, output.name, value)
        if between:
            self._give("gradient", stage, item, between)

    def _add(self, variant: StageVariant, stage: int, name: str, value: Value) -> None:
        if name in variant.hosted and name not in variant.staying:
            self.lanes.settle_host()
            self.gathered.add_on_host(stage, name, value)
        else:
            self.gathered.add(stage, name, value, self.lanes)


def _what(action: Action) -> str:
    return "activation" if action.kind.endswith("activation") else "gradient"


def _by_lane(values: list[Value], lanes: int) -> list[list[Tensor]]:
    """Each lane's list of inputs."""
    return [[value[lane] for value in values] for lane in range(lanes)]


def _without_weights(variant: StageVariant, values: dict[str, Value]) -> dict[str, Value]:
    """What is saved but the weights themselves: the backward takes those of its own version."""
    kind = {node: item.kind for node, item in variant.inputs.items()}
    return {name: value for name, value in values.items() if kind.get(name) is not InputKind.PARAMETER}


def drive(runs: Mapping[int, Iterator[None]]) -> None:
    """Let workers of one process run, in turn, until all are through."""
    waiting = dict(runs)
    while waiting:
        for rank in list(waiting):
            try:
                next(waiting[rank])
            except StopIteration:
                del waiting[rank]
