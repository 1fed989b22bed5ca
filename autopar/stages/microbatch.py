"""The program of one microbatch, and what is computed before the first: together they give the whole batch's result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.capture.program import InputKind, OutputKind, Program, ProgramInput
from autopar.errors import MicrobatchError
from autopar.fake_calls import FakeCalls
from autopar.passes.collectives import is_collective
from autopar.passes.copy_graph import copy_node, graph_of, with_ancestors
from autopar.passes.insert_moves import insert_moves
from autopar.passes.localize import fake_mode_of, localize
from autopar.passes.moves import move
from autopar.sharding.assignment import Assignment, is_getitem
from autopar.sharding.layout import REPLICATE, format_placement, shard_dim
from autopar.sharding.op_call import op_name, tensor_inputs
from autopar.sharding.rules.creation import OFFSET
from autopar.sharding.strategies import Strategy
from autopar.stages.loss_counts import explicit_counts
from autopar.stages.sizes import BatchCut, TimeGeometry, cut_batch
from autopar.stages.time_layouts import RulesOf, TimeLayouts, time_layouts
from autopar.torch_compat import LazyGraphModule

EARLY = "early"  # inputs of a microbatch that are computed from the call's inputs


@dataclass(frozen=True, slots=True)
class EarlyValue:
    """An output of the early graph (or an input of the call that is read whole), and the input that it becomes."""

    name: str  # of the program's input
    node: str  # in the early graph


@dataclass(frozen=True)
class Microbatches:
    """A program over a batch as one program per microbatch.

    `pieces`: per microbatch its program; equal ones are the same object. `early`: a graph over the whole inputs, run
    once; its outputs are `early_values`, inputs of every piece. `inputs`: how each input of a piece lies over time,
    `outputs`: how each output does: chunks are joined, partial sums added, whole values taken from the first.
    """

    whole: Program
    cut: BatchCut
    pieces: tuple[Program, ...]
    early: fx.GraphModule | None
    early_values: tuple[EarlyValue, ...]
    inputs: Mapping[str, Placement]  # by placeholder
    outputs: tuple[Placement, ...]
    layouts: TimeLayouts | None  # None: every piece is the program as it is
    independent: bool = False  # each microbatch is a batch of its own, with its own loss and random numbers
    accumulated: bool = False  # independent ones, of which a step adds up the gradients

    @property
    def count(self) -> int:
        return len(self.pieces)

    @property
    def of_a_step(self) -> int:
        """Over how many microbatches the gradients of one update are added up."""
        return 1 if self.independent and not self.accumulated else self.count


def batch_size(program: Program) -> int:
    """The samples of the call: dim 0 of its first input that has dims; 1 if there is none."""
    for node in program.named_inputs(InputKind.INPUT).values():
        value: Tensor = node.meta["val"]
        if value.dim():
            return int(value.shape[0])
    return 1


def cut_microbatches(program: Program, microbatches: int, rules_of: RulesOf) -> Microbatches:
    """Cut a program over a whole batch into microbatches. Raises MicrobatchError where that would change its result."""
    if microbatches == 1:
        return cut_as(program, BatchCut((1,)), None)
    cut = cut_batch(batch_size(program), microbatches)
    return cut_as(program, cut, time_layouts(explicit_counts(program), cut, rules_of))


def cut_as(program: Program, cut: BatchCut, layouts: TimeLayouts | None) -> Microbatches:
    """The microbatches of a program under layouts that were found already."""
    if layouts is None:
        inputs = {item.node: REPLICATE for item in program.inputs}
        outputs = (REPLICATE,) * len(program.outputs)
        return Microbatches(program, cut, (program,), None, (), inputs, outputs, None)
    return _Cutter(explicit_counts(program), cut, layouts).run()


def independent_microbatches(program: Program, count: int) -> Microbatches:
    """Microbatches that are batches of their own: `program` is captured on the first of them.

    Losses and gradients are added up, outputs joined; what each makes of a buffer is the next one's to read.
    """
    size = batch_size(program)
    nodes = {node.name: node for node in program.graph_module.graph.nodes if node.op == "placeholder"}
    inputs: dict[str, Placement] = {}
    for item in program.inputs:
        shape = tuple(nodes[item.node].meta["val"].shape)
        batched = item.kind is InputKind.INPUT and shape[:1] == (size,)
        inputs[item.node] = Shard(0) if batched else REPLICATE
    outputs: list[Placement] = []
    for output, node in zip(program.outputs, program.results, strict=True):
        joined = output.kind is OutputKind.OUTPUT and tuple(node.meta["val"].shape[:1]) == (size,)
        added = output.kind in (OutputKind.LOSS, OutputKind.GRADIENT)
        outputs.append(Shard(0) if joined else Partial() if added else REPLICATE)
    cut = BatchCut((size,) * count)
    return Microbatches(program, cut, (program,) * count, None, (), inputs, tuple(outputs), None, independent=True)


class _Cutter:
    def __init__(self, program: Program, cut: BatchCut, layouts: TimeLayouts) -> None:
        self.program, self.cut, self.layouts = program, cut, layouts
        self.nodes = {node.name: node for node in program.graph_module.graph.nodes}

    def run(self) -> Microbatches:
        outputs = tuple(self.layouts.placed[node.name] for node in self.program.results)
        self._check_outputs(outputs)
        early_nodes = list(dict.fromkeys(name for name, _ in self.layouts.early))
        values = {pair: f"{EARLY}:{pair[0]}:{format_placement(pair[1])}" for pair in self.layouts.early}
        graph, inputs = self._per_microbatch(values)
        assignment = self._assignment(graph, inputs, values)
        calls = FakeCalls(fake_mode_of(self.program.graph_module))
        moved = insert_moves(graph, assignment)
        pieces: list[Program] = []
        differ = any(_knows_its_place(node, self.layouts) for node in moved.graph.nodes)
        for index, length in enumerate(self.cut.lengths):
            if index and not differ and length == self.cut.lengths[index - 1]:
                pieces.append(pieces[-1])
                continue
            geometry = TimeGeometry((len(self.cut.lengths),), (index,), ("time",), self._device, self.cut)
            pieces.append(self._piece(localize(moved, assignment, geometry, calls), inputs))
        return Microbatches(
            whole=self.program,
            cut=self.cut,
            pieces=tuple(pieces),
            early=self._early_graph(early_nodes) if early_nodes else None,
            early_values=tuple(EarlyValue(name, node) for (node, _), name in values.items()),
            inputs={name: layout[0] for name, layout in assignment.inputs.items()},
            outputs=outputs,
            layouts=self.layouts,
        )

    @property
    def _device(self) -> str:
        devices = {node.meta["val"].device.type for node in self.nodes.values() if node.op == "placeholder"}
        return devices.pop() if len(devices) == 1 else "cpu"

    def _check_outputs(self, outputs: tuple[Placement, ...]) -> None:
        for item, placement in zip(self.program.outputs, outputs, strict=True):
            if item.kind is OutputKind.BUFFER and placement != REPLICATE:
                raise MicrobatchError(
                    f"the buffer {item.name!r} is computed from the whole batch",
                    fix="use microbatches=1, or eval() for the module that writes it; or batch_semantics='accumulated'",
                )
            if isinstance(placement, Partial) and placement.reduce_op != "sum":
                raise MicrobatchError(
                    f"the output {item.name!r} is a {placement.reduce_op} over the whole batch",
                    fix="use microbatches=1, or compute it outside of the model",
                )

    def _per_microbatch(
        self, values: Mapping[tuple[str, Placement], str]
    ) -> tuple[fx.GraphModule, tuple[ProgramInput, ...]]:
        """The graph in full shapes, with early values as placeholders behind the others; and what they all are."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        inputs = list(self.program.inputs)
        made: dict[tuple[str, Placement], fx.Node] = {}
        for node in self.program.graph_module.graph.nodes:
            if node.op == "placeholder":
                copies[node] = copy_node(graph, node, copies)
        for pair, name in values.items():
            made[pair] = graph.placeholder(f"{EARLY}_{pair[0]}_{format_placement(pair[1])}")
            made[pair].meta.update(self.nodes[pair[0]].meta, key=made[pair].name, phase="forward", module="", where="")
            inputs.append(ProgramInput(made[pair].name, InputKind.INPUT, name))
        for node in self.program.graph_module.graph.nodes:
            if node.op == "call_function" and self._runs(node):
                copies[node] = self._copied(graph, node, copies, made)
        results = [self._result(node, copies, made) for node in self.program.results]
        graph.output(tuple(results))
        graph.eliminate_dead_code()
        return LazyGraphModule(torch.nn.Module(), graph), tuple(inputs)

    def _runs(self, node: fx.Node) -> bool:
        """Whether a microbatch runs the op: what is known whole is computed early."""
        while is_getitem(node):
            node = node.all_input_nodes[0]
        return node.name in self.layouts.rules

    def _copied(
        self,
        graph: fx.Graph,
        node: fx.Node,
        copies: Mapping[fx.Node, fx.Node],
        made: Mapping[tuple[str, Placement], fx.Node],
    ) -> fx.Node:
        if is_getitem(node):
            return copy_node(graph, node, copies)
        wanted = iter(self.layouts.rules[node.name].inputs)

        def source(value: fx.Node) -> fx.Node:
            early = made.get((value.name, next(wanted)))
            return copies[value] if early is None else early

        copy = graph.create_node(node.op, node.target, (), {}, node.name)
        copy.args, copy.kwargs = fx.map_arg(node.args, source), fx.map_arg(node.kwargs, source)
        copy.meta = dict(node.meta)
        assert len(tensor_inputs(copy)) == len(tensor_inputs(node))
        return copy

    def _result(
        self, node: fx.Node, copies: Mapping[fx.Node, fx.Node], made: Mapping[tuple[str, Placement], fx.Node]
    ) -> fx.Node:
        early = made.get((node.name, self.layouts.placed[node.name]))
        return copies[node] if early is None else early

    def _assignment(
        self,
        gm: fx.GraphModule,
        inputs: tuple[ProgramInput, ...],
        values: Mapping[tuple[str, Placement], str],
    ) -> Assignment:
        names = {node.name for node in gm.graph.nodes}
        strategies = {name: Strategy((rule,)) for name, rule in self.layouts.rules.items() if name in names}
        by_name = {name: pair[1] for pair, name in values.items()}
        placed = {
            item.node: (by_name[item.name] if item.name in by_name else self.layouts.placed[item.node],)
            for item in inputs
        }
        return Assignment((len(self.cut.lengths),), strategies, placed, (None,) * len(self.program.outputs))

    def _piece(self, gm: fx.GraphModule, inputs: tuple[ProgramInput, ...]) -> Program:
        """A program of a localized graph: views are views again, and keys are unique."""
        seen: set[str] = set()
        for node in gm.graph.nodes:
            assert not is_collective(node), f"{node.name}: a microbatch cannot talk to others"
            if node.target is torch.ops.aten.reshape.default:
                node.target = torch.ops.aten.view.default
            if node.op == "call_function":
                node.meta.pop("move", None)  # a slice of what is known whole: an op of the microbatch like any other
                node.meta["key"] = _unused(node.meta.get("key", node.name), seen)
        return replace(self.program, graph_module=gm, inputs=inputs)

    def _early_graph(self, names: list[str]) -> fx.GraphModule:
        """The early values of the whole inputs, in the order of `names`."""
        results = [self.nodes[name] for name in names]
        needed = with_ancestors(results)
        nodes = [node for node in self.program.graph_module.graph.nodes if node in needed]
        return LazyGraphModule(torch.nn.Module(), graph_of([], nodes, results))


def _unused(key: str, seen: set[str]) -> str:
    """`key`, with a number behind it if it is taken."""
    number, own = 0, key
    while own in seen:
        number += 1
        own = f"{key}.{number}"
    seen.add(own)
    return own


def _knows_its_place(node: fx.Node, layouts: TimeLayouts) -> bool:
    """Whether the local op differs between microbatches of one length: by where their samples lie in the batch."""
    if node.target is move:
        return True
    if node.op != "call_function" or is_getitem(node) or isinstance(node.target, str):
        return False
    name = op_name(node.target)
    if name.startswith("autopar.attention"):
        dropout_p: Any = node.args[-6]
        return bool(dropout_p > 0)
    return name.startswith("autopar.random") or layouts.rules[node.name].form == OFFSET


def part_of(value: Tensor, placement: Placement, cut: BatchCut, microbatch: int) -> Tensor:
    """The part of a whole value that belongs to one microbatch."""
    dim = shard_dim(placement)
    if dim is None:
        return value
    start, length = cut.chunk(value.shape[dim], microbatch)
    return value.narrow(dim, start, length)
