"""What a choice costs: moves counted once where they are shared, and the exact memory of the emitted program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.capture.program import InputKind, Program
from autopar.plan import MoveCost, PlanEntry
from autopar.planner.build import PlanningProblem
from autopar.planner.decisions import Decision, Optimizer
from autopar.planner.liveness import predicted_timeline
from autopar.planner.prices import Prices
from autopar.passes.local_call import RankGeometry
from autopar.passes.pipeline import LocalProgram, emit
from autopar.runtime.virtual_groups import virtual_group_name
from autopar.sharding.layout import Layout, replicated
from autopar.sharding.registry import has_rule
from autopar.sharding.reshard import reshard_steps
from autopar.sharding.strategies import Strategy, local_bytes


@dataclass(frozen=True)
class Measured:
    """The price of one choice."""

    entries: tuple[PlanEntry, ...]
    step_s: float
    peak_bytes: int
    memory: Mapping[str, int]
    notes: tuple[str, ...]


def measure(planning: PlanningProblem, choice: Sequence[int], prices: Prices, optimizer: Optimizer) -> Measured:
    """Seconds and bytes of a choice on the largest rank."""
    entries = plan_entries(planning, choice, prices)
    loose = _result_moves(planning, choice, prices)
    seconds = sum(entry.seconds + sum(move.seconds for move in entry.moves) for entry in entries)
    memory = _memory(planning, choice, prices, optimizer)
    return Measured(
        entries=entries,
        step_s=seconds + sum(move.seconds for move in loose),
        peak_bytes=sum(memory.values()),
        memory=memory,
        notes=_notes(planning, choice),
    )


def plan_entries(planning: PlanningProblem, choice: Sequence[int], prices: Prices) -> tuple[PlanEntry, ...]:
    """One entry per parameter, input and op."""
    moves = _Moves(planning, choice, prices)
    entries = []
    for index, (decision, pick) in enumerate(zip(planning.decisions, choice, strict=True)):
        strategy = decision.strategies[pick]
        if decision.kind in ("gradient", "result") or (decision.kind != "op" and len(decision.strategies) == 1):
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
                bytes=_output_bytes(decision, strategy, planning.mesh_shape),
                moves=moves.into(index, strategy),
            )
        )
    return tuple(entries)


def _output_bytes(decision: Decision, strategy: Strategy, mesh_shape: Sequence[int]) -> int:
    pairs = zip(decision.specs, strategy.outputs, strict=True)
    return sum(local_bytes(spec, layout, mesh_shape) for spec, layout in pairs if spec is not None)


class _Moves:
    """Moves into a decision, each value moved to one layout once per phase, as `insert_moves` does."""

    def __init__(self, planning: PlanningProblem, choice: Sequence[int], prices: Prices) -> None:
        self.planning, self.choice, self.prices = planning, choice, prices
        self.done: set[tuple[int, int, Layout, str]] = set()

    def into(self, index: int, strategy: Strategy) -> tuple[MoveCost, ...]:
        found: list[MoveCost] = []
        decision = self.planning.decisions[index]
        for source, target in zip(decision.sources, strategy.inputs, strict=True):
            key = (source.decision, source.output, target, decision.phase)
            if key not in self.done:
                self.done.add(key)
                found.extend(self._steps(source.decision, source.output, target))
        return tuple(found)

    def _steps(self, index: int, output: int, target: Layout) -> list[MoveCost]:
        producer = self.planning.decisions[index]
        spec = producer.specs[output]
        assert spec is not None
        source = producer.strategies[self.choice[index]].outputs[output]
        if source == target:
            return []
        steps = reshard_steps(spec, source, target, self.planning.mesh_shape, self.prices.collective)
        return [MoveCost(step.collective or "slice", step.axis, int(step.bytes), step.seconds) for step in steps]


def _result_moves(planning: PlanningProblem, choice: Sequence[int], prices: Prices) -> list[MoveCost]:
    moves = _Moves(planning, choice, prices)
    found: list[MoveCost] = []
    for index, (decision, pick) in enumerate(zip(planning.decisions, choice, strict=True)):
        if decision.kind in ("gradient", "result"):
            found.extend(moves.into(index, decision.strategies[pick]))
    return found


def origin_geometry(mesh_shape: tuple[int, ...], device: str = "cpu") -> RankGeometry:
    """The rank at the origin, which holds the largest shards, in virtual groups."""
    origin = (0,) * len(mesh_shape)
    names = tuple(virtual_group_name(axis, origin, mesh_shape) for axis in range(len(mesh_shape)))
    return RankGeometry(mesh_shape, origin, names, device)


def _memory(
    planning: PlanningProblem, choice: Sequence[int], prices: Prices, optimizer: Optimizer
) -> dict[str, int]:
    """Bytes by kind at the peak of the emitted program of the rank at the origin."""
    local = emit(planning.program, planning.assignment(choice), origin_geometry(planning.mesh_shape))
    memory = dict(predicted_timeline(local).peak_by_kind())
    state = 0
    for decision, pick in zip(planning.decisions, choice, strict=True):
        if decision.kind == "parameter":
            held = _output_bytes(decision, decision.strategies[pick], planning.mesh_shape)
            state += int(decision.bytes[pick]) - held
    if state:
        memory["optimizer_state"] = state
    return memory


def _notes(planning: PlanningProblem, choice: Sequence[int]) -> tuple[str, ...]:
    """Ops that run in full on every rank for want of a rule."""
    lacking: dict[str, str] = {}
    for decision in planning.decisions:
        if decision.call is not None and not has_rule(decision.call):
            lacking.setdefault(decision.call.name, decision.where)
    return tuple(f"{name} has no sharding rule and runs replicated" + (f" ({where})" if where else "")
                 for name, where in sorted(lacking.items()))  # fmt: skip
