"""Which stage runs each op, given where the forward is cut.

The forward falls into runs of consecutive ops. An op of the backward runs as late as its gradient allows, on a stage
that has what it reads of the forward; so what crosses a cut backward is what crossed it forward, where that can be.
Ops that read no parameter (masks, positions) and views of parameters belong to no stage: each makes its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from autopar.capture.program import InputKind, OutputKind, Program
from autopar.passes.split_phases import backward_nodes
from autopar.passes.storages import view_base
from autopar.sharding.assignment import is_getitem

aten = torch.ops.aten
CASTS = (aten._to_copy.default,)


@dataclass(frozen=True)
class Anatomy:
    """The joint graph seen as a pipeline: `forward` are the ops that a cut divides, in order; `late` those of the
    backward; `free` the ops that any stage can make for itself; `parameters` of free nodes: what they look at."""

    program: Program
    forward: tuple[fx.Node, ...]
    late: frozenset[fx.Node]
    free: frozenset[fx.Node]
    parameters: dict[fx.Node, frozenset[fx.Node]]

    @property
    def order(self) -> dict[fx.Node, int]:
        return {node: index for index, node in enumerate(self.forward)}


def anatomy(program: Program) -> Anatomy:
    """Sort the nodes of a program into what a cut divides, what runs backward, and what is free."""
    graph = program.graph_module.graph
    kinds = {item.node: item.kind for item in program.inputs}
    late = frozenset(backward_nodes(graph, program))
    free: set[fx.Node] = set()
    parameters: dict[fx.Node, frozenset[fx.Node]] = {}
    forward: list[fx.Node] = []
    for node in graph.nodes:
        if node in late or node.op == "output":
            continue
        if node.op in ("placeholder", "get_attr"):
            free.add(node)
            is_parameter = node.op == "placeholder" and kinds[node.name] is InputKind.PARAMETER
            parameters[node] = frozenset([node]) if is_parameter else frozenset()
            continue
        sources = node.all_input_nodes
        read = frozenset().union(*(parameters.get(source, frozenset()) for source in sources))
        if all(source in free for source in sources) and (not read or _is_light(node)):
            free.add(node)
            parameters[node] = read
        else:
            forward.append(node)
    return Anatomy(program, tuple(forward), late, frozenset(free), parameters)


def _is_light(node: fx.Node) -> bool:
    """Whether a stage had rather make a parameter's view or cast again than have it sent."""
    return view_base(node) is not None or is_getitem(node) or node.target in CASTS


def owner(node: fx.Node) -> fx.Node:
    """The op that makes a value: of one of several outputs, the op that has them."""
    while is_getitem(node):
        node = node.all_input_nodes[0]
    return node


@dataclass
class StageAssignment:
    """`stage`: of every op that a cut divides, and of every op of the backward. `addends`: of each parameter's
    gradient, the values that add up to it, by stage."""

    anatomy: Anatomy
    count: int
    stage: dict[fx.Node, int] = field(default_factory=dict)
    addends: dict[str, dict[int, list[fx.Node]]] = field(default_factory=dict)
    parameter_stages: dict[fx.Node, set[int]] = field(default_factory=lambda: defaultdict(set))


def assign_stages(found: Anatomy, cuts: Sequence[int]) -> StageAssignment:
    """The stages of all ops when the forward is cut before the ops of these numbers, in rising order."""
    result = StageAssignment(found, len(cuts) + 1)
    _Assigner(result, tuple(cuts)).run()
    return result


class _Assigner:
    def __init__(self, result: StageAssignment, cuts: tuple[int, ...]) -> None:
        self.result, self.cuts = result, cuts
        self.anatomy, self.stage = result.anatomy, result.stage
        self.has: dict[fx.Node, set[int]] = defaultdict(set)  # the stages that a value of the forward is on
        self.graph = self.anatomy.program.graph_module.graph
        self.results = self.anatomy.program.results
        self.sums: set[fx.Node] = set()  # of gradients, taken apart

    def run(self) -> None:
        self._place_forward()
        leaves = self._gradient_addends()
        for node in self.graph.nodes:
            if node in self.anatomy.late and node not in self.sums:
                self.stage[node] = self._place_late(node)
        self._lower(leaves)
        self._collect(leaves)

    def _place_forward(self) -> None:
        current = 0
        for index, node in enumerate(self.anatomy.forward):
            while current < len(self.cuts) and self.cuts[current] <= index:
                current += 1
            own = self.stage[owner(node)] if is_getitem(node) else current
            self.stage[node] = own
            self.has[node].add(own)
            for source in node.all_input_nodes:
                self.has[source].add(own)
                for parameter in self.anatomy.parameters.get(source, ()):
                    self.result.parameter_stages[parameter].add(own)

    def _gradient_addends(self) -> dict[str, list[fx.Node]]:
        """Per gradient, the values whose sum it is: sums that nothing else reads are taken apart."""
        program = self.anatomy.program
        found = {}
        for output, result in zip(program.outputs, program.results, strict=True):
            if output.kind is not OutputKind.GRADIENT:
                continue
            waiting, leaves = [result], []
            while waiting:
                node = waiting.pop()
                if self._is_only_summed(node, result):
                    self.sums.add(node)
                    waiting.extend(item for item in reversed(node.args) if isinstance(item, fx.Node))
                else:
                    leaves.append(node)
            found[output.name] = leaves
        return found

    def _is_only_summed(self, node: fx.Node, result: fx.Node) -> bool:
        uses = len(node.users) == 1 and self.results.count(node) == (1 if node is result else 0)
        return uses and node in self.anatomy.late and _is_sum(node)

    def _place_late(self, node: fx.Node) -> int:
        if is_getitem(node):
            return self.stage[node.all_input_nodes[0]]
        if node.op == "placeholder":
            return self._tangent_stage(node)
        latest = self.result.count - 1
        limits: list[set[int]] = []
        for source in node.all_input_nodes:
            if source in self.anatomy.late:
                latest = min(latest, self.stage[source])
            else:
                limits.extend(self._stages_with(source))
        for candidate in range(latest, -1, -1):
            if all(candidate in stages for stages in limits):
                return candidate
        return self._beside_parameters(node, latest)

    def _stages_with(self, source: fx.Node) -> list[set[int]]:
        """The stages that hold a value of the forward; nothing if any stage can make it."""
        if source in self.anatomy.free:
            known = [self.result.parameter_stages.get(item) for item in self.anatomy.parameters[source]]
            return [stages for stages in known if stages]
        return [self.has[source]]

    def _beside_parameters(self, node: fx.Node, latest: int) -> int:
        """Where no stage has all that an op reads: as late as may be, with its parameters if they are there at all."""
        sources = [source for source in node.all_input_nodes if source not in self.anatomy.late]
        wanted = [stages for source in sources if source in self.anatomy.free for stages in self._stages_with(source)]
        stage = min(latest, max((max(self.has[it]) for it in sources if it not in self.anatomy.free), default=latest))
        for candidate in range(latest, -1, -1):
            if wanted and all(candidate in stages for stages in wanted):
                stage = candidate
                break
        for source in sources:
            if source not in self.anatomy.free and self.stage[source] < stage:
                self.has[source].add(stage)
        return stage

    def _tangent_stage(self, node: fx.Node) -> int:
        program = self.anatomy.program
        name = next(item.name for item in program.inputs if item.node == node.name)
        for output, result in zip(program.outputs, program.results, strict=True):
            if output.differentiable and output.name == name:
                return self.stage.get(result, self.result.count - 1)
        return self.result.count - 1

    def _lower(self, leaves: dict[str, list[fx.Node]]) -> None:
        """Bring what only earlier stages read down to them, where that sends no more."""
        wanted: dict[fx.Node, set[int]] = defaultdict(set)
        nodes = {item.node: item for item in self.anatomy.program.inputs}
        placeholders = {
            nodes[node.name].name: node
            for node in self.graph.nodes
            if node.op == "placeholder" and nodes[node.name].kind is InputKind.PARAMETER
        }
        for name, addends in leaves.items():
            stages = self.result.parameter_stages.get(placeholders[name]) if name in placeholders else None
            for node in addends:
                own = self.stage.get(node)
                if own is not None:
                    wanted[node].add(own if not stages or own in stages else max(stages))
        for node in reversed(list(self.graph.nodes)):
            if node not in self.stage or node not in self.anatomy.late or node.op == "placeholder" or is_getitem(node):
                continue
            values = [node, *(user for user in node.users if is_getitem(user))]
            targets = {
                self.stage[user]
                for value in values
                for user in value.users
                if user in self.stage and user not in values
            }
            targets |= {stage for value in values for stage in wanted[value]}
            if targets and max(targets) < self.stage[node] and self._may_go_down(node, max(targets)):
                for value in values:
                    self.stage[value] = max(targets)

    def _may_go_down(self, node: fx.Node, target: int) -> bool:
        own, sent = self.stage[node], 0
        for source in node.all_input_nodes:
            if source in self.anatomy.late:
                crosses = any(self.stage.get(user, own) <= target for user in source.users if user is not node)
                sent += 0 if crosses or self.stage[source] <= target else size_of(source)
            elif any(target not in stages for stages in self._stages_with(source)):
                return False
        return sent <= size_of(node)

    def _collect(self, leaves: dict[str, list[fx.Node]]) -> None:
        for name, addends in leaves.items():
            by_stage: dict[int, list[fx.Node]] = defaultdict(list)
            for node in addends:
                by_stage[self.stage.get(node, self.result.count - 1)].append(node)
            self.result.addends[name] = dict(by_stage)


def _is_sum(node: fx.Node) -> bool:
    """Whether a node adds two tensors of its own shape."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    shape = node.meta["val"].shape
    return all(isinstance(item, fx.Node) and item.meta["val"].shape == shape for item in node.args)


def size_of(node: fx.Node) -> int:
    """Bytes of a value, or of all the outputs of an op."""
    value = node.meta.get("val")
    values: Iterable[object] = value if isinstance(value, (tuple, list)) else (value,)
    return sum(item.numel() * item.element_size() for item in values if isinstance(item, Tensor))
