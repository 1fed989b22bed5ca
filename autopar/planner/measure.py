"""What a choice costs: moves counted once where they are shared; memory and step time of the emitted program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autopar.collector import collector_paused
from autopar.cost_models.simulator import StepOps
from autopar.passes.local_call import RankGeometry
from autopar.passes.pipeline import LocalProgram, emit_ranks
from autopar.plan_details import MoveCost, PlanDetails
from autopar.plan_entries import OpWithoutRule, PlanEntry
from autopar.planner.build import PlanningProblem
from autopar.planner.decisions import Decision
from autopar.planner.emitted_ops import emitted_ops
from autopar.planner.liveness import Timeline, predicted_timeline
from autopar.planner.memory_details import memory_details
from autopar.planner.node_prices import origin_geometry, virtual_geometry
from autopar.planner.optimizer_state import Optimizer
from autopar.planner.prices import Prices
from autopar.planner.residency import USUAL, Residency
from autopar.planner.saved_values import SavedValues, late_decisions, moment
from autopar.sharding.assignment import RECOMPUTES, Assignment
from autopar.sharding.discovery.book import RuleBook
from autopar.sharding.discovery.finder import Finding
from autopar.sharding.layout import Layout
from autopar.sharding.reshard import moves_once, reshard_steps
from autopar.sharding.strategies import Strategy, local_bytes

AT_ONCE = 2  # parameters whose state from the host is on the device at once while they are stepped


def predicted_step_s(planning: PlanningProblem, choice: Sequence[int], prices: Prices) -> float:
    """Seconds of one step on the largest rank, before anything is emitted.

    Every op, and every move once, less what the problem expects to hide of it.
    """
    decisions = planning.decisions
    total = sum(float(costs[pick]) for costs, pick in zip(planning.problem.costs, choice, strict=True))
    moves = _Moves(planning, choice, prices, frozenset())
    for first, second, argument, matrix in planning.reads():
        target = decisions[second].strategies[choice[second]].inputs[argument]
        if moves.is_first(decisions[second], argument, target):
            total += float(matrix[choice[first], choice[second]])
    return total


def _all_moves(
    planning: PlanningProblem, choice: Sequence[int], prices: Prices, gathered_once: Set[int] = frozenset()
) -> list[tuple[MoveCost, ...]]:
    """Per decision, the moves into it."""
    moves = _Moves(planning, choice, prices, gathered_once)
    return [
        moves.into(index, decision.strategies[pick])
        for index, (decision, pick) in enumerate(zip(planning.decisions, choice, strict=True))
    ]


def plan_entries(
    planning: PlanningProblem, choice: Sequence[int], prices: Prices, residency: Residency = USUAL
) -> tuple[PlanEntry, ...]:
    """One entry per parameter, input and op.

    A gradient's moves are listed with its parameter, an output's with the op that makes it. What is recomputed says so,
    and so does what is kept for the backward, small values aside.
    """
    kept = {index for index, value in SavedValues(planning.decisions).values.items() if value.direct}
    moves = _all_moves(planning, choice, prices, residency.gathered_once)
    own = {decision.name: index for index, decision in enumerate(planning.decisions) if decision.kind == "parameter"}
    extra: dict[int, tuple[MoveCost, ...]] = {}
    for index, decision in enumerate(planning.decisions):
        if decision.kind in ("gradient", "result"):
            host = own.get(decision.name, decision.sources[0].decision)
            extra[host] = extra.get(host, ()) + moves[index]
    entries = []
    for index, (decision, pick) in enumerate(zip(planning.decisions, choice, strict=True)):
        strategy = decision.strategies[pick]
        is_only_one = decision.kind != "op" and len(decision.strategies) == 1 and not residency.of(index)
        if decision.kind in ("gradient", "result") or is_only_one:
            continue
        entries.append(
            PlanEntry(
                key=decision.key,
                kind=decision.kind,
                inputs=strategy.inputs if decision.kind == "op" else (),
                outputs=strategy.outputs,
                module=decision.module,
                where=decision.where,
                seconds=float(decision.seconds[pick]),
                bytes=output_bytes(decision, strategy, planning.mesh_shape),
                moves=moves[index] + extra.get(index, ()),
                residency=residency.of(index) or ("keep" if index in kept else ""),
            )
        )
    return tuple(entries)


def output_bytes(decision: Decision, strategy: Strategy, mesh_shape: Sequence[int]) -> int:
    """Of what a decision gives under a strategy, on the largest rank."""
    pairs = zip(decision.specs, strategy.outputs, strict=True)
    return sum(local_bytes(spec, layout, mesh_shape) for spec, layout in pairs if spec is not None)


class _Moves:
    """Moves into a decision: each value to one layout once per phase, or once in all where `insert_moves` saves it."""

    def __init__(
        self, planning: PlanningProblem, choice: Sequence[int], prices: Prices, gathered_once: Set[int]
    ) -> None:
        self.planning, self.choice, self.prices = planning, choice, prices
        self.gathers = planning.moves(choice, prices)
        self.gathered_once = gathered_once
        self.done: set[tuple[int, int, Layout, str]] = set()

    def into(self, index: int, strategy: Strategy) -> tuple[MoveCost, ...]:
        found: list[MoveCost] = []
        decision = self.planning.decisions[index]
        for argument, (source, target) in enumerate(zip(decision.sources, strategy.inputs, strict=True)):
            if self.is_first(decision, argument, target):
                found.extend(self._steps(source.decision, source.output, target))
        return tuple(found)

    def is_first(self, decision: Decision, argument: int, target: Layout) -> bool:
        """Whether this reader, in program order, is the first that needs its input in that layout."""
        source = decision.sources[argument]
        key = (source.decision, source.output, target)
        if self._is_done(*key, decision.phase):
            return False
        self.done.add((*key, decision.phase))
        return True

    def _is_done(self, index: int, output: int, target: Layout, phase: str) -> bool:
        if (index, output, target, phase) in self.done:
            return True
        if phase == "backward" and self.gathers.is_gathered((index, output, target), self.gathered_once):
            return True
        producer = self.planning.decisions[index]
        source = producer.strategies[self.choice[index]].outputs[output]
        once = producer.kind == "op" and moves_once(source, target, self.planning.mesh_shape)
        return once and (index, output, target, "forward") in self.done

    def _steps(self, index: int, output: int, target: Layout) -> list[MoveCost]:
        producer = self.planning.decisions[index]
        spec = producer.specs[output]
        assert spec is not None
        source = producer.strategies[self.choice[index]].outputs[output]
        if source == target:
            return []
        steps = reshard_steps(spec, source, target, self.planning.mesh_shape, self.prices.collective)
        return [
            MoveCost(step.collective or "slice", step.axis, int(step.bytes), step.seconds, step.copied_bytes)
            for step in steps
        ]


def telling_ranks(assignment: Assignment) -> tuple[RankGeometry, RankGeometry]:
    """The rank at the origin, which has the largest shards, and one that has as much of other ranks' as any.

    That is a rank between two others along an axis with halos, and the last one along an axis with rings, whose queries
    see the keys of all under a causal mask. On other axes both stand at 0.
    """
    shape, rules = assignment.mesh_shape, [strategy.rules for strategy in assignment.strategies.values()]
    rings = {axis for per_axis in rules for axis, rule in enumerate(per_axis) if rule.ring is not None}
    halos = {axis for per_axis in rules for axis, rule in enumerate(per_axis) if rule.halo is not None}
    inside = tuple(
        ranks - 1 if axis in rings else min(1, ranks - 1) if axis in halos else 0 for axis, ranks in enumerate(shape)
    )
    return origin_geometry(shape), virtual_geometry(inside, shape)


@dataclass(frozen=True)
class Measured:
    """What the emitted program of the fullest rank holds: bytes by kind at its peak; and in all at each of its
    nodes, and just before what the node makes, with the moment (`saved_values.moment`) to which the node belongs.
    `local`: the program of the busiest rank."""

    memory: Mapping[str, int]
    moments: npt.NDArray[np.int64]
    totals: npt.NDArray[np.float64]
    before: npt.NDArray[np.float64]
    local: LocalProgram
    timeline: Timeline  # without the optimizer's state

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())

    def details(self, prices: Prices, limit: int) -> PlanDetails:
        """What people read of it."""
        device = prices.mesh.profile.least_memory_bytes(prices.mesh.size)
        timeline = memory_details(self.timeline, self.memory.get("optimizer_state", 0), limit, device)
        phases = {"forward": self.local.forward, "backward": self.local.backward}
        code = {name: str(gm.code) for name, gm in phases.items() if gm is not None}
        return PlanDetails(timeline, code)

    def step_ops(self, prices: Prices, optimizer: Optimizer) -> StepOps:
        """The step of every rank, for the simulator, which slows each one down by itself."""
        mesh = prices.mesh
        return StepOps(
            emitted_ops(self.local, replace(prices, speed=1.0), optimizer),
            mesh.shape,
            mesh.profile.rank_speeds,
            mesh.profile.overlap,
        )


@collector_paused()
def measured_program(planning: PlanningProblem, choice: Sequence[int], residency: Residency = USUAL) -> Measured:
    """The memory of the emitted program under a choice."""
    assignment = planning.assignment(choice, residency)
    ranks = list(dict.fromkeys(telling_ranks(assignment)))
    programs = emit_ranks(planning.program, assignment, ranks, fake_calls=planning.fake_calls)
    fullest, timeline = max(((it, predicted_timeline(it)) for it in programs), key=lambda pair: pair[1].peak_bytes)
    memory = dict(timeline.peak_by_kind())
    state = 0
    for index, (decision, pick) in enumerate(zip(planning.decisions, choice, strict=True)):
        if decision.kind == "parameter" and index not in residency.hosted:
            held = output_bytes(decision, decision.strategies[pick], planning.mesh_shape)
            state += int(decision.bytes[pick]) - held
    end = timeline.totals[-1] if timeline.totals else 0
    state += max(
        0, end + sum(sorted(host_state(planning, choice, residency).values())[-AT_ONCE:]) - timeline.peak_bytes
    )
    if state:
        memory["optimizer_state"] = state
    totals = np.array(timeline.totals, dtype=np.float64) + state
    return Measured(
        memory, _moments(planning, fullest), totals, totals - np.array(timeline.born), programs[-1], timeline
    )


def host_state(planning: PlanningProblem, choice: Sequence[int], residency: Residency) -> dict[int, int]:
    """Bytes of optimizer state that an optimizer keeps on a rank's host, by parameter on the device that has some."""
    found = {}
    for index, (decision, pick) in enumerate(zip(planning.decisions, choice, strict=True)):
        if decision.host_bytes is not None and index not in residency.hosted:
            found[index] = int(decision.host_bytes[pick])
    return found


def hosted_state(planning: PlanningProblem, choice: Sequence[int], residency: Residency) -> int:
    """Bytes of optimizer state on a rank's host, of the parameters that lie there themselves."""
    total = 0
    for index in residency.hosted:
        decision, pick = planning.decisions[index], choice[index]
        held = output_bytes(decision, decision.strategies[pick], planning.mesh_shape)
        total += int(decision.bytes[pick]) - held
        total += 0 if decision.host_bytes is None else int(decision.host_bytes[pick])
    return total


def _moments(planning: PlanningProblem, local: LocalProgram) -> npt.NDArray[np.int64]:
    """Per emitted node, its moment; what belongs to no decision, such as a move, has that of the next one."""
    late, count = late_decisions(planning.decisions), len(planning.decisions)
    place = {decision.key: index for index, decision in enumerate(planning.decisions) if decision.kind == "op"}
    phases = [gm.graph for gm in (local.forward, local.backward) if gm is not None]
    nodes = [
        (node, phase is not local.forward.graph) for phase in phases for node in phase.nodes if node.op != "output"
    ]
    time, current = count - 1, moment(count - 1, count, count)
    found = []
    for node, is_late in reversed(nodes):
        own = place.get(node.meta.get("key")) if node.op == "call_function" else None
        if own is not None and RECOMPUTES in node.meta:
            current = min(current, moment(time, own, count))
        elif own is not None and late[own] == is_late:
            time = min(time, own)
            current = min(current, moment(time, count, count))
        found.append(current)
    return np.array(found[::-1], dtype=np.int64)


def ops_without_rule(planning: PlanningProblem, rules: RuleBook) -> tuple[OpWithoutRule, ...]:
    """The ops that nobody wrote a rule for: with those that were discovered, or why they run replicated."""
    found: dict[tuple[str, Finding], list[Decision]] = {}
    for decision in planning.decisions:
        finding = rules.findings.get(decision.call) if decision.call is not None else None
        if finding is not None and decision.call is not None:
            found.setdefault((decision.call.name, finding), []).append(decision)
    return tuple(
        OpWithoutRule(name, len(uses), finding.texts, finding.why, uses[0].where)
        for (name, finding), uses in sorted(found.items(), key=lambda item: item[0][0])
    )
