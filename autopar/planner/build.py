"""From decisions to a search problem: costs in seconds, usages in bytes, an edge for each tensor that is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.capture.program import Program
from autopar.collector import collector_paused
from autopar.fake_calls import FakeCalls
from autopar.passes.localize import fake_mode_of
from autopar.planner.decisions import Decision, result_key
from autopar.planner.kept_experts import kept_pairs
from autopar.planner.moves_again import MovesAgain
from autopar.planner.overlap import MoveCosts, Window, Windows
from autopar.planner.prices import VIEWS, Prices
from autopar.planner.residency import USUAL, Residency
from autopar.planner.saved_forms import SavedForms
from autopar.search import FORBIDDEN, Problem
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout import Layout
from autopar.sharding.op_call import TensorSpec

Matrix = npt.NDArray[np.float64]
TIED = -1


@dataclass(frozen=True)
class PlanningProblem:
    """A problem and the decisions that its nodes stand for, node by node.

    `edge_arguments`: per edge, which input of its second end it feeds; TIED for one that keeps two layouts equal.
    """

    program: Program
    decisions: tuple[Decision, ...]
    problem: Problem
    mesh_shape: tuple[int, ...]
    edge_arguments: tuple[int, ...]
    fake_calls: FakeCalls = field(repr=False, compare=False)  # what the emissions of candidates have in common
    gradients_stay: frozenset[str] = frozenset()  # parameters whose gradients stay on the device, wherever they lie
    _moves: dict[tuple[int, ...], MovesAgain] = field(init=False, repr=False, compare=False, default_factory=dict)

    def assignment(self, choice: Sequence[int], residency: Residency = USUAL) -> Assignment:
        """What the passes need of a choice."""
        found = assignment_of(self.program, self.decisions, choice, self.mesh_shape, residency)
        stay = {item.node for item in self.decisions if item.kind == "parameter" and item.name in self.gradients_stay}
        return replace(found, staying=found.hosted & stay)

    def reads(self) -> Iterator[tuple[int, int, int, Matrix]]:
        """(producer, reader, which input of the reader, cost matrix) of every edge that moves a value."""
        edges = zip(self.problem.edges, self.edge_arguments, self.problem.edge_costs, strict=True)
        return ((*ends, argument, matrix) for ends, argument, matrix in edges if argument != TIED)

    def moves(self, choice: Sequence[int], prices: Prices) -> MovesAgain:
        """The moves of a choice, worked out once."""
        known = self._moves.get(tuple(choice))
        if known is None or known.prices is not prices:
            known = self._moves[tuple(choice)] = MovesAgain(self.decisions, choice, prices, self.seconds_of_reads)
        return known

    @cached_property
    def seconds_of_reads(self) -> dict[tuple[int, int], Matrix]:
        """By reader and which of its inputs: the cost matrix of the edge that feeds it."""
        return {(reader, argument): matrix for _, reader, argument, matrix in self.reads()}

    def restricted(self, allowed: Mapping[int, npt.NDArray[np.bool_]]) -> Problem:
        """The problem with, for the decisions named, only some strategies allowed."""
        costs = list(self.problem.costs)
        for index, mask in allowed.items():
            costs[index] = np.where(mask, costs[index], float(FORBIDDEN))
        problem = self.problem
        return Problem(
            tuple(costs), problem.usages, problem.intervals, problem.edges, problem.edge_costs,
            problem.usage_limit, problem.groups, problem.name,
        )  # fmt: skip


def assignment_of(
    program: Program,
    decisions: Sequence[Decision],
    choice: Sequence[int],
    mesh_shape: tuple[int, ...],
    residency: Residency = USUAL,
) -> Assignment:
    """The strategies of all nodes, the layouts of inputs and outputs, and what becomes of values, under a choice."""
    strategies, inputs = {}, {}
    results: dict[str, Layout] = {}
    for decision, pick in zip(decisions, choice, strict=True):
        strategy = decision.strategies[pick]
        if decision.kind == "op":
            strategies[decision.node] = strategy
        elif decision.kind in ("gradient", "result"):
            results[decision.key] = strategy.outputs[0]
        else:
            inputs[decision.node] = strategy.outputs[0]
    outputs = tuple(results.get(result_key(output)) for output in program.outputs)
    again = frozenset(decisions[index].node for index in residency.recomputed)
    once = frozenset(decisions[index].node for index in residency.gathered_once)
    packed = SavedForms(decisions).packed(residency) if residency.packed else {}
    hosted = frozenset(decisions[index].node for index in residency.hosted)
    pairs = [pair for pair in kept_pairs(decisions, choice) if pair[0] not in residency.recomputed]
    kept = {decisions[backward].node: decisions[forward].node for backward, forward in pairs}
    return Assignment(mesh_shape, strategies, inputs, outputs, again, once, packed, hosted, kept)


@collector_paused()
def build_problem(
    program: Program, decisions: tuple[Decision, ...], prices: Prices, *, usage_limit: float | None
) -> PlanningProblem:
    """The joint problem of all decisions under a limit in bytes."""
    edges, arguments, matrices = _edges(decisions, prices)
    groups: dict[object, int] = {}
    usages: dict[tuple[int, bool], Matrix] = {}  # repeated layers share theirs
    problem = Problem(
        costs=tuple(decision.seconds for decision in decisions),
        usages=tuple(_usage(decision, usages) for decision in decisions),
        intervals=_intervals(decisions),
        edges=tuple(edges),
        edge_costs=tuple(matrices),
        usage_limit=usage_limit,
        groups=tuple(groups.setdefault(decision.group, len(groups)) for decision in decisions),
    )
    fake_calls = FakeCalls(fake_mode_of(program.graph_module))
    return PlanningProblem(program, decisions, problem, prices.mesh.shape, tuple(arguments), fake_calls)


def _usage(decision: Decision, known: dict[tuple[int, bool], Matrix]) -> Matrix:
    is_view = decision.call is not None and decision.call.name in VIEWS
    key = id(decision.bytes), is_view
    if key not in known:
        known[key] = np.zeros(len(decision.strategies)) if is_view else decision.bytes.astype(np.float64)
    return known[key]


def _intervals(decisions: Sequence[Decision]) -> tuple[tuple[int, int], ...]:
    """When each decision's value is alive, in decision indices; a view keeps alive what it looks at.

    A gradient is reduced as soon as it is there.
    """
    count = len(decisions)
    starts = list(range(count))
    ends = [index + 1 for index in range(count)]
    roots = list(range(count))
    for index, decision in enumerate(decisions):
        if decision.call is not None and decision.call.name in VIEWS and decision.sources:
            roots[index] = roots[decision.sources[0].decision]
        for source in decision.sources:
            root = roots[source.decision]
            ends[root] = max(ends[root], 1 + (source.decision if decision.kind == "gradient" else index))
        if decision.kind in ("parameter", "buffer", "input", "constant"):
            starts[index], ends[index] = 0, count
        elif decision.kind == "gradient":
            starts[index], ends[index] = decision.sources[0].decision, count
    return tuple(zip(starts, ends, strict=True))


class _EdgeCosts:
    """Cost matrices of moves, shared among edges of equal ends and windows."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.known: dict[tuple[TensorSpec, tuple[Layout, ...], tuple[Layout, ...]], MoveCosts] = {}
        self.by_ends: dict[tuple[int, int, int, int], MoveCosts] = {}
        self.tied: dict[int, Matrix] = {}

    def matrix(self, producer: Decision, output: int, consumer: Decision, argument: int, window: Window) -> Matrix:
        ends = (id(producer.strategies), output, id(consumer.strategies), argument)
        if ends not in self.by_ends:
            spec = producer.specs[output]
            assert spec is not None
            sources = tuple(strategy.outputs[output] for strategy in producer.strategies)
            targets = tuple(strategy.inputs[argument] for strategy in consumer.strategies)
            costs = MoveCosts(spec, sources, targets, self.prices)
            self.by_ends[ends] = self.known.setdefault((spec, sources, targets), costs)
        costs = self.by_ends[ends]
        return costs.of_gradient(window) if consumer.kind == "gradient" else costs.under(window)

    def tie(self, count: int) -> Matrix:
        """For two decisions of `count` strategies that choose the same."""
        if count not in self.tied:
            self.tied[count] = np.where(np.eye(count, dtype=bool), 0.0, float(FORBIDDEN))
        return self.tied[count]


def _edges(decisions: Sequence[Decision], prices: Prices) -> tuple[list[tuple[int, int]], list[int], list[Matrix]]:
    """Endpoints, arguments and cost matrices of all edges."""
    costs, windows = _EdgeCosts(prices), Windows(decisions, prices)
    edges: list[tuple[int, int]] = []
    arguments: list[int] = []
    matrices: list[Matrix] = []
    parameters = {decision.name: index for index, decision in enumerate(decisions) if decision.kind == "parameter"}
    tangents = {decision.name: index for index, decision in enumerate(decisions) if decision.kind == "tangent"}
    for index, decision in enumerate(decisions):
        for argument, source in enumerate(decision.sources):
            edges.append((source.decision, index))
            arguments.append(argument)
            window = windows.of(index, argument)
            matrices.append(costs.matrix(decisions[source.decision], source.output, decision, argument, window))
        if decision.kind == "gradient" and decision.name in parameters:
            edges.append((parameters[decision.name], index))
            arguments.append(TIED)
            matrices.append(costs.tie(len(decision.strategies)))
        if decision.key == f"leaving:{decision.name}" and decision.name in tangents:
            edges.append((tangents[decision.name], index))  # what comes back of it lies as it does
            arguments.append(TIED)
            matrices.append(costs.tie(len(decision.strategies)))
    return edges, arguments, matrices
