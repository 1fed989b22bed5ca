"""The program of each stage: what arrives, what the stage computes, what leaves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autopar.capture.program import BETWEEN_STAGES, InputKind, OutputKind, Program, ProgramInput, ProgramOutput
from autopar.passes.copy_graph import copy_node
from autopar.stages.assign import StageAssignment, size_of
from autopar.torch_compat import LazyGraphModule

aten = torch.ops.aten

Edge = tuple[int, int]


def boundary_name(node: fx.Node) -> str:
    """The name, among a stage's inputs and outputs, of a value that goes between stages."""
    return f"{BETWEEN_STAGES}{node.name}"


def is_boundary(name: str) -> bool:
    return name.startswith(BETWEEN_STAGES)


@dataclass(frozen=True)
class StageProgram:
    """One stage: a program whose inputs besides the usual ones are ARRIVING values and TANGENTs of other stages, and
    whose outputs besides the usual ones are LEAVING values and boundary GRADIENTs.
    """

    index: int
    program: Program


@dataclass(frozen=True)
class StagedProgram:
    """A program as stages. `activations` and `gradients`: by (earlier stage, later stage), the names of the values
    that the forward of the earlier one gives to the later, and that the backward of the later gives back."""

    whole: Program
    stages: tuple[StageProgram, ...]
    activations: Mapping[Edge, tuple[str, ...]]
    gradients: Mapping[Edge, tuple[str, ...]]
    bytes: Mapping[str, int]  # of each value that goes between stages

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The pairs of stages that talk to each other, and all neighbours."""
        pairs = {*self.activations, *self.gradients, *((it, it + 1) for it in range(len(self.stages) - 1))}
        return tuple(sorted(pairs))

    @property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """Parameters and gradients of inputs that several stages hold, by name."""
        holders: dict[str, set[int]] = defaultdict(set)
        for stage in self.stages:
            for name in held_names(stage.program):
                holders[name].add(stage.index)
        return {name: tuple(sorted(stages)) for name, stages in holders.items() if len(stages) > 1}


def held_names(program: Program) -> set[str]:
    """The parameters of a stage, and what else it has a gradient of."""
    names = {item.name for item in program.inputs if item.kind is InputKind.PARAMETER}
    gradients = {item.name for item in program.outputs if item.kind is OutputKind.GRADIENT}
    return names | {name for name in gradients if not is_boundary(name)}


def stage_programs(assignment: StageAssignment) -> StagedProgram:
    """Cut a program into the stages of an assignment.

    Invariant: the stages, run in order forward and in reverse backward, compute what the program computes; gradients
    of which several stages have a part are the sum of the parts.
    """
    return _Splitter(assignment).run()


@dataclass
class _Splitter:
    assignment: StageAssignment
    activations: dict[Edge, dict[fx.Node, None]] = field(default_factory=lambda: defaultdict(dict))
    gradients: dict[Edge, dict[fx.Node, None]] = field(default_factory=lambda: defaultdict(dict))

    def __post_init__(self) -> None:
        self.found = self.assignment.anatomy
        self.stage = self.assignment.stage
        self.program = self.found.program
        self.nodes = list(self.program.graph_module.graph.nodes)
        self.homes = self._homes_of_results()

    def run(self) -> StagedProgram:
        self._note_crossings()
        stages = tuple(_Stage(self, index).program() for index in range(self.assignment.count))
        return StagedProgram(
            whole=self.program,
            stages=stages,
            activations=_named(self.activations),
            gradients=_named(self.gradients),
            bytes={
                boundary_name(node): size_of(node)
                for crossing in (self.activations, self.gradients)
                for nodes in crossing.values()
                for node in nodes
            },
        )

    def _homes_of_results(self) -> list[dict[int, list[fx.Node]]]:
        """Per result of the program, the stages that make it, with what they add up for it."""
        homes: list[dict[int, list[fx.Node]]] = []
        last = self.assignment.count - 1
        for output, node in zip(self.program.outputs, self.program.results, strict=True):
            if output.kind is OutputKind.GRADIENT:
                homes.append(self.assignment.addends[output.name])
            else:
                homes.append({self.stage.get(node, last): [node]})
        return homes

    def _note_crossings(self) -> None:
        for node in self.nodes:
            if node.op == "output" or node not in self.stage:
                continue
            for source in node.all_input_nodes:
                self._note(source, self.stage[node])
        for by_stage in self.homes:
            for stage, addends in by_stage.items():
                for node in addends:
                    self._note(node, stage)

    def _note(self, source: fx.Node, reader: int) -> None:
        home = self.stage.get(source)
        if home is None or home == reader:
            return
        if reader > home:
            assert source not in self.found.late, f"{source.name}: a gradient cannot go forward"
            self.activations[home, reader][source] = None
        else:
            self.gradients[reader, home][source] = None

    def arriving(self, stage: int) -> list[fx.Node]:
        """Values of the forward that come to a stage."""
        return _unique(node for (_, reader), nodes in self.activations.items() if reader == stage for node in nodes)

    def leaving(self, stage: int) -> list[fx.Node]:
        return _unique(node for (home, _), nodes in self.activations.items() if home == stage for node in nodes)

    def given_back(self, stage: int) -> list[fx.Node]:
        """Values that a stage sends to earlier ones after its backward."""
        return _unique(node for (_, home), nodes in self.gradients.items() if home == stage for node in nodes)

    def tangents(self, stage: int) -> list[fx.Node]:
        return _unique(node for (reader, _), nodes in self.gradients.items() if reader == stage for node in nodes)


def _unique(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return sorted(dict.fromkeys(nodes))


def _named(crossing: Mapping[Edge, Mapping[fx.Node, None]]) -> dict[Edge, tuple[str, ...]]:
    return {edge: tuple(map(boundary_name, sorted(nodes))) for edge, nodes in sorted(crossing.items())}


class _Stage:
    """Builds the graph of one stage."""

    def __init__(self, splitter: _Splitter, index: int) -> None:
        self.splitter, self.index = splitter, index
        self.graph, self.copies = fx.Graph(), dict[fx.Node, fx.Node]()
        self.inputs: list[ProgramInput] = []

    def program(self) -> StageProgram:
        results = self._results()
        needed = self._needed([node for _, nodes in results for node in nodes])
        self._placeholders(needed)
        for node in self.splitter.nodes:
            if node in needed and node not in self.copies:
                self.copies[node] = copy_node(self.graph, node, self.copies)
        self.graph.output(tuple(self._sum(nodes) for _, nodes in results))
        gm = LazyGraphModule(torch.nn.Module(), self.graph)
        gm.graph.lint()
        outputs = tuple(output for output, _ in results)
        whole = self.splitter.program
        names = {item.name for item in self.inputs if item.kind is InputKind.CONSTANT}
        constants = {name: value for name, value in whole.constants.items() if name in names}
        program = replace(
            whole, graph_module=gm, inputs=tuple(self.inputs), outputs=outputs, tied=(), constants=constants
        )
        return StageProgram(self.index, program)

    def _results(self) -> list[tuple[ProgramOutput, list[fx.Node]]]:
        """This stage's outputs: the user's, what leaves, buffers, gradients."""
        splitter, own = self.splitter, self.index
        pairs = zip(splitter.program.outputs, splitter.homes, strict=True)
        mine = [(output, home[own]) for output, home in pairs if own in home]
        order = {OutputKind.LOSS: 0, OutputKind.OUTPUT: 0, OutputKind.LEAVING: 1, OutputKind.BUFFER: 2}
        mine += [(ProgramOutput(OutputKind.LEAVING, boundary_name(node)), [node]) for node in splitter.leaving(own)]
        mine += [(ProgramOutput(OutputKind.GRADIENT, boundary_name(node)), [node]) for node in splitter.given_back(own)]
        return sorted(mine, key=lambda pair: order.get(pair[0].kind, 3))

    def _is_foreign(self, node: fx.Node) -> bool:
        return self.splitter.stage.get(node, self.index) != self.index

    def _needed(self, nodes: list[fx.Node]) -> set[fx.Node]:
        """What the results need, down to what arrives; free nodes included."""
        found: set[fx.Node] = set()
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                if not self._is_foreign(node):
                    waiting.extend(node.all_input_nodes)
        return found

    def _placeholders(self, needed: set[fx.Node]) -> None:
        """The program's own inputs that are needed, what arrives, and last, in the backward, tangents."""
        splitter = self.splitter
        items = {item.node: item for item in splitter.program.inputs}
        own = [node for node in splitter.nodes if node.op == "placeholder" and node in needed]
        early = [node for node in own if items[node.name].kind is not InputKind.TANGENT]
        late = [node for node in own if items[node.name].kind is InputKind.TANGENT and not self._is_foreign(node)]
        for node in early:
            self._add(node, items[node.name])
        for node in splitter.arriving(self.index):
            self._add(node, ProgramInput(node.name, InputKind.ARRIVING, boundary_name(node)))
        for node in late:
            self._add(node, items[node.name])
        for node in splitter.tangents(self.index):
            self._add(node, ProgramInput(node.name, InputKind.TANGENT, boundary_name(node)))

    def _add(self, node: fx.Node, item: ProgramInput) -> None:
        if node in self.copies:
            return
        copy = self.graph.placeholder(node.name)
        phase = "backward" if item.kind is InputKind.TANGENT else "forward"
        copy.meta.update({**node.meta, "key": copy.name, "phase": phase, "module": "", "where": ""})
        self.copies[node] = copy
        self.inputs.append(replace(item, node=copy.name))

    def _sum(self, nodes: list[fx.Node]) -> fx.Node:
        """The sum of what the stage adds to a gradient."""
        total = self.copies[nodes[0]]
        for number, node in enumerate(nodes[1:]):
            meta = node.meta
            total = self.graph.call_function(aten.add.Tensor, (total, self.copies[node]))
            total.meta.update({**meta, "val": nodes[0].meta["val"], "phase": "backward"})
            total.meta["key"] = f"{meta['key']}.sum{number}"
        return total
