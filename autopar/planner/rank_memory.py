"""What each rank of a pipeline holds, action by action, storage by storage: the walk keeps and drops what the executor
keeps and drops (`autopar.runtime.pipeline.worker`), so that values that several of its tables name count once.

Every microbatch counts as the first, the largest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.tensor import Partial

from autopar.capture.program import InputKind, OutputKind, ProgramOutput
from autopar.planner.graph_storages import GraphStorages
from autopar.planner.stage_storages import StageStorages
from autopar.schedules.actions import Action, Schedule, halves
from autopar.sharding.layout import shard_dim
from autopar.stages.assign import size_of
from autopar.stages.stage_programs import is_boundary
from autopar.stages.staged import Staged

Value = tuple[int, ...]  # the storages under a value, by number
ADDED_AT_ONCE = 2
FORWARD, BACKWARD = "activation", "gradient"  # what a message carries


def rank_peaks(staged: Staged, schedule: Schedule, stages: Sequence[StageStorages]) -> tuple[int, ...]:
    """The most bytes that each pipeline rank holds at once, without what the call brings (`call_bytes`)."""
    return tuple(_RankWalk(staged, schedule, stages, rank).peak() for rank in range(len(schedule.ranks)))


class _Held:
    """Storages, each held so many times. `bytes` of all of them; `peak_bytes`: the most there ever were."""

    def __init__(self) -> None:
        self.size: dict[int, int] = {}
        self.uses: dict[int, int] = {}
        self.bytes = self.peak_bytes = 0

    def fresh(self, bytes_: int) -> int:
        """A storage that nobody holds yet."""
        number = len(self.size)
        self.size[number] = bytes_
        self.uses[number] = 0
        return number

    def keep(self, value: Value) -> Value:
        for number in value:
            if not self.uses[number]:
                self.bytes += self.size[number]
            self.uses[number] += 1
        self.reach(self.bytes)
        return value

    def drop(self, value: Value) -> None:
        for number in value:
            self.uses[number] -= 1
            if not self.uses[number]:
                self.bytes -= self.size[number]

    def reach(self, bytes_: int) -> None:
        self.peak_bytes = max(self.peak_bytes, bytes_)

    def made(self, bytes_: int) -> Value:
        """A new storage, held once."""
        return self.keep((self.fresh(bytes_),))


@dataclass
class _RankWalk:
    staged: Staged
    schedule: Schedule
    stages: Sequence[StageStorages]
    rank: int
    held: _Held = field(default_factory=_Held)
    arrived: dict[tuple[int, str, str, int], Value] = field(default_factory=dict)
    incoming: dict[tuple[int, str, int], list[tuple[str, Value]]] = field(default_factory=lambda: defaultdict(list))
    leaving: dict[tuple[str, int, int, int], list[tuple[Value, int]]] = field(default_factory=dict)
    sent: list[Value] = field(default_factory=list)
    saved: dict[tuple[int, int], dict[str, Value]] = field(default_factory=dict)
    kept: dict[tuple[int, int], dict[str, Value]] = field(default_factory=dict)
    outputs: dict[tuple[OutputKind, str], list[Value]] = field(default_factory=lambda: defaultdict(list))
    gradients: dict[tuple[int, str], Value] = field(default_factory=dict)
    owned: set[tuple[int, str]] = field(default_factory=set)
    added: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    stashed: dict[tuple[int, int], Value] = field(default_factory=dict)
    buffers: dict[str, Value] = field(default_factory=dict)

    def peak(self) -> int:
        fixed: dict[str, int] = {}  # of parameters that several of the rank's stages read there is one
        for stage in self.schedule.stages_of(self.rank):
            fixed |= self.stages[stage].fixed
        self.held.made(sum(fixed.values()))
        actions = self.schedule.ranks[self.rank]
        if self.staged.has_loss or not self.schedule.synchronous:
            self._follow(actions)
        else:
            forward, backward = halves(actions)
            self._follow(forward)
            self._give_outputs()
            self._follow(backward)
        self._sum_shared()
        return self.held.peak_bytes

    def _follow(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self._do(action)

    def _give_outputs(self) -> None:
        """Every rank gets the outputs in full, and has them while the backwards run."""
        for output, node in zip(self.staged.program.outputs, self.staged.program.results, strict=True):
            key = output.kind, output.name
            if key in self.staged.given:
                self.held.made(size_of(node))
                self._drop(self.outputs.pop(key, ()))

    def _sum_shared(self) -> None:
        """Gradients that stages share are summed, one after the other: those of the rank, then those of all ranks."""
        for name, stages in self.staged.shared_gradients.items():
            ranks = {self.schedule.rank_of(stage) for stage in stages}
            if self.rank not in ranks:
                continue
            bytes_ = max(one.weights.get(name, 0) for one in self.stages)
            own = [self.gradients.pop(key) for key in sorted(self.gradients) if key[1] == name]
            if len(own) != 1:
                own = [self._summed(own, bytes_)]
            if len(ranks) > 1:
                own += [self.held.made(bytes_) for _ in range(len(ranks) - 1)]
                self._summed(own, bytes_)

    def _summed(self, parts: Sequence[Value], bytes_: int) -> Value:
        """The sum of some parts, added one after the other; the parts are let go of at the end."""
        total = self.held.made(bytes_)
        if len(parts) > ADDED_AT_ONCE:
            self.held.reach(self.held.bytes + bytes_)
        self._drop(parts)
        return total

    def _do(self, action: Action) -> None:
        stage, item = action.stage, action.microbatch
        match action.kind:
            case "forward":
                self._take(stage, item, FORWARD)
                self._forward(stage, item)
            case "backward" | "backward_input":
                self._take(stage, item, BACKWARD)
                self._backward(stage, item, whole=action.kind == "backward")
            case "backward_weight":
                self._backward_weight(stage, item)
            case "send_activation" | "send_gradient":
                self._send(action.kind.removeprefix("send_"), stage, action.peer, item)
            case "recv_activation" | "recv_gradient":
                self._receive(action.kind.removeprefix("recv_"), action.peer, stage, item)
            case _:
                self._weights(action)

    def _names(self, what: str, source: int, reader: int) -> tuple[str, ...]:
        first = self.staged.first
        crossing = first.activations if what == FORWARD else first.gradients
        return crossing.get((min(source, reader), max(source, reader)), ())

    def _send(self, what: str, stage: int, peer: int, item: int) -> None:
        if not self._names(what, stage, peer):
            return
        values = self.leaving.pop((what, stage, peer, item))
        packed = [self.held.made(bytes_) if bytes_ else self.held.keep(value) for value, bytes_ in values]
        self._drop(self.sent)
        self.sent = packed
        self._drop(value for value, _ in values)

    def _receive(self, what: str, source: int, stage: int, item: int) -> None:
        for name in self._names(what, source, stage):
            bytes_ = self.stages[stage].received[_input_kind(what), name]
            self.incoming[stage, what, item].append((name, self.held.made(bytes_)))

    def _take(self, stage: int, item: int, what: str) -> None:
        for name, value in self.incoming.pop((stage, what, item), ()):
            self.arrived[stage, what, name, item] = value
            self._drop(self.sent)
            self.sent = []

    def _give(self, what: str, stage: int, item: int, values: Mapping[str, tuple[Value, int]]) -> None:
        first = self.staged.first
        edges = first.activations if what == FORWARD else first.gradients
        for (earlier, later), names in edges.items():
            source, reader = (earlier, later) if what == FORWARD else (later, earlier)
            if source != stage:
                continue
            for name in names:
                self.held.keep(values[name][0])
            if self.schedule.rank_of(reader) == self.rank:
                self.arrived.update({(reader, what, name, item): values[name][0] for name in names})
            else:
                self.leaving[what, stage, reader, item] = [values[name] for name in names]

    def _drop(self, values: Iterable[Value]) -> None:
        for value in values:
            self.held.drop(value)

    def _bound(self, one: StageStorages, stage: int, graph: GraphStorages, node: str, item: int) -> Value:
        """What is in a placeholder that nothing saved."""
        kind, name = one.inputs[node]
        if kind is InputKind.ARRIVING or is_boundary(name):
            return self.arrived.pop((stage, FORWARD if kind is InputKind.ARRIVING else BACKWARD, name, item))
        return self.held.keep(tuple(self.held.fresh(graph.bytes[storage]) for storage in graph.taken[node]))

    def _run(self, graph: GraphStorages, given: Mapping[str, Value]) -> list[Value]:
        """A graph's results, held; what it was given is its own, and let go of at the last reader."""
        self._drop(given.values())
        places: dict[int, Value] = {}
        last: dict[int, int] = {}
        for node, value in given.items():
            for storage in graph.taken[node]:
                places[storage] = value
                for number in value:
                    if not self.held.uses[number]:
                        last[number] = max(last.get(number, 0), graph.last[storage])
        lent = ((end, self.held.size[number]) for number, end in last.items())
        self.held.reach(self.held.bytes + graph.peak_bytes(lent))
        for storage in dict.fromkeys(storage for result in graph.results for storage in result):
            if storage not in places:
                places[storage] = (self.held.fresh(graph.bytes[storage]),)
        found = (dict.fromkeys(number for it in result for number in places[it]) for result in graph.results)
        return [self.held.keep(tuple(result)) for result in found]

    def _forward(self, stage: int, item: int) -> None:
        one = self.stages[stage]
        graph, saved = one.forward, one.graphs.local.saved
        results = self._run(graph, {node: self._bound(one, stage, graph, node, item) for node in graph.taken})
        leaving: dict[str, tuple[Value, int]] = {}
        for index, output in enumerate(one.program.early_outputs):
            if output.kind is OutputKind.LEAVING:
                leaving[output.name] = results[index], graph.packing_bytes(index)
            else:
                self._note_output(output, item, results[index], graph.dense_bytes[index])
        self.saved[stage, item] = self._kept(one, saved, results[len(results) - len(saved) :])
        self._give(FORWARD, stage, item, leaving)
        self._drop(results)

    def _kept(self, one: StageStorages, names: Sequence[str], values: Sequence[Value]) -> dict[str, Value]:
        """What is saved for a later graph, but the weights, which that takes anew."""
        pairs = zip(names, values, strict=True)
        return {node: self.held.keep(value) for node, value in pairs if node not in one.weight_nodes}

    def _note_output(self, output: ProgramOutput, item: int, value: Value, dense_bytes: int) -> None:
        key = output.kind, output.name
        if output.kind is OutputKind.OUTPUT and key not in self.staged.given:
            return
        placement, independent = self.staged.over_time[key], self.staged.microbatches.independent
        if output.kind is OutputKind.BUFFER and independent:
            self.held.drop(self.buffers.get(output.name, ()))
            self.buffers[output.name] = self.held.keep(value)
        held = self.outputs[key]
        if isinstance(placement, Partial) and held:
            total = self.held.made(dense_bytes)
            self._drop(held)
            self.outputs[key] = [total]
        elif shard_dim(placement) is not None or item == 0 or isinstance(placement, Partial):
            held.append(self.held.keep(value))
        elif independent:
            self.held.keep(value)
            self._drop(held)
            self.outputs[key] = [value]

    def _inputs(
        self, one: StageStorages, graph: GraphStorages, place: tuple[int, int], saved: dict[str, Value]
    ) -> dict[str, Value]:
        """What goes into a backward graph: what was saved for it, which is taken away, and what it takes anew."""
        stage, item = place
        return {
            node: saved.pop(node) if node in saved else self._bound(one, stage, graph, node, item)
            for node in graph.taken
        }

    def _backward(self, stage: int, item: int, *, whole: bool) -> None:
        one, saved = self.stages[stage], self.saved.pop((stage, item))
        if one.graphs.backward is not None:
            graph = one.backward if whole else one.of_inputs
            results = self._run(graph, self._inputs(one, graph, (stage, item), saved))
            if whole:
                self._deliver(one, stage, item, graph, range(len(one.program.gradients)), results)
            else:
                urgent, kept = one.split.urgent, one.split.kept
                self._deliver(one, stage, item, graph, urgent, results[: len(urgent)])
                self.kept[stage, item] = self._kept(one, kept, results[len(urgent) :])
            self._drop(results)
        self._drop(saved.values())
        if whole:
            self._count(stage)

    def _backward_weight(self, stage: int, item: int) -> None:
        one, kept = self.stages[stage], self.kept.pop((stage, item), None)
        if kept is not None:
            graph = one.of_weights
            results = self._run(graph, self._inputs(one, graph, (stage, item), kept))
            others = [index for index in range(len(one.program.gradients)) if index not in one.split.urgent]
            self._deliver(one, stage, item, graph, others, results)
            self._drop(results)
            self._drop(kept.values())
        self._count(stage)

    def _deliver(
        self,
        one: StageStorages,
        stage: int,
        item: int,
        graph: GraphStorages,
        numbers: Sequence[int],
        results: Sequence[Value],
    ) -> None:
        between: dict[str, tuple[Value, int]] = {}
        for at, (number, value) in enumerate(zip(numbers, results, strict=True)):
            output = one.program.gradients[number]
            if output.is_between_stages:
                between[output.name] = value, graph.packing_bytes(at)
                continue
            placement = self.staged.over_time[output.kind, output.name]
            if shard_dim(placement) is not None:
                self.outputs[output.kind, output.name].append(self.held.keep(value))
            elif isinstance(placement, Partial) or item == 0:
                self._add(stage, output.name, value, graph.dense_bytes[at])
        if between:
            self._give(BACKWARD, stage, item, between)

    def _add(self, stage: int, name: str, value: Value, dense_bytes: int) -> None:
        key = stage, name
        if key not in self.gradients:
            self.gradients[key] = self.held.keep(value)
        elif key not in self.owned:
            total = self.held.made(dense_bytes)
            self.held.drop(self.gradients[key])
            self.gradients[key] = total
            self.owned.add(key)

    def _count(self, stage: int) -> None:
        """After the last microbatch before an update, gradients are summed over the ranks of the stage."""
        self.added[stage] += 1
        one = self.stages[stage]
        if self.added[stage] % (self.schedule.update_every or self.schedule.microbatches) or not one.graphs.deferred:
            return
        keys = [(stage, one.program.gradients[number].name) for number in one.graphs.deferred.numbers]
        given = dict(zip(one.of_step.taken, (self.gradients.pop(key) for key in keys), strict=True))
        for key, value in zip(keys, self._run(one.of_step, given), strict=True):
            self.gradients[key] = value
            self.owned.discard(key)

    def _weights(self, action: Action) -> None:
        stage, version = action.stage, action.version
        match action.kind:
            case "stash_weights":
                self.stashed[stage, version] = self.held.made(sum(self.stages[stage].weights.values()))
            case "drop_weights":
                self.held.drop(self.stashed.pop((stage, version)))
            case "optimizer_step":
                if self.schedule.update_every > 1:  # the mean is made of each sum in turn
                    self.held.reach(self.held.bytes + max(self.stages[stage].weights.values(), default=0))
                for key in [key for key in self.gradients if key[0] == stage]:
                    self.held.drop(self.gradients.pop(key))
                    self.owned.discard(key)
            case _:
                pass  # a restored version is a stashed one


def _input_kind(what: str) -> InputKind:
    return InputKind.ARRIVING if what == FORWARD else InputKind.TANGENT
