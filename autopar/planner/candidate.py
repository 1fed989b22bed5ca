"""A choice of strategies and what becomes of its values: one plan among those that are compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cost_models.simulator import StepOps
from autopar.planner.build import PlanningProblem
from autopar.planner.fit import Fitted
from autopar.planner.measure import Measured, host_state, hosted_state, measured_program
from autopar.planner.moves_again import MovesAgain
from autopar.planner.optimizer_state import Optimizer
from autopar.planner.prices import Prices
from autopar.planner.residency import USUAL, Residency
from autopar.search import Solution
from autopar.sharding.strategies import local_bytes

HELD = ("parameter", "buffer", "input", "constant")
"""Kinds of decisions whose values are there from beginning to end."""


@dataclass
class Candidate:
    """One choice; memory and step time are those of the emitted program, and only found when they are asked for."""

    choice: tuple[int, ...]
    solution: Solution
    name: str
    foreseen_s: float  # of the step, before anything is emitted
    planning: PlanningProblem
    prices: Prices
    optimizer: Optimizer
    residency: Residency = USUAL
    residency_s: float = 0.0  # part of foreseen_s: more than the usual residency takes

    @cached_property
    def measured(self) -> Measured:
        return measured_program(self.planning, self.choice, self.residency)

    @cached_property
    def step_ops(self) -> StepOps:
        return self.measured.step_ops(self.prices, self.optimizer)

    @cached_property
    def step_s(self) -> float:
        return self.step_ops.step_s

    @property
    def best_known_s(self) -> float:
        """Seconds of the step as simulated, or as foreseen if it has not been."""
        return self.step_s if "step_s" in self.__dict__ else self.foreseen_s

    @property
    def peak_bytes(self) -> int:
        return self.measured.peak_bytes

    @property
    def host_memory(self) -> dict[str, int]:
        """Bytes by kind where one rank's host holds most: what is offloaded, parameters, gradients, optimizer state."""
        away = host_state(self.planning, self.choice, self.residency).values()
        state = sum(away) + hosted_state(self.planning, self.choice, self.residency)
        found = dict(self.measured.timeline.host_memory)
        return {**found, "optimizer_state": state} if state else found

    @property
    def fitted(self) -> Fitted:
        return Fitted(self.residency, self.residency_s, self.measured)

    def fits(self, limit: int) -> bool:
        """Whether the emitted program fits. Not emitted where it is clear that it cannot."""
        if "measured" not in self.__dict__ and self.least_bytes > limit:
            return False
        return self.peak_bytes <= limit

    @cached_property
    def least_bytes(self) -> int:
        """Less than the emitted program holds when the backward begins: what is always there, and saved values.

        Of a value that the backward reads, and that is not recomputed, the emitted program saves at least the smaller
        of its shard and a copy as the backward reads it; and of a parameter, the gathered copy that is kept.
        """
        decisions = self.planning.decisions
        always = sum(
            int(item.bytes[pick])
            for index, (item, pick) in enumerate(zip(decisions, self.choice, strict=True))
            if item.kind in HELD and index not in self.residency.hosted
        )
        moves = self.planning.moves(self.choice, self.prices)
        once = self.residency.gathered_once
        kept = sum(gather.bytes for gather in moves.gathers.values() if gather.is_direct and gather.root in once)
        return always + kept + sum(self._saved_bytes(moves).values())

    def _saved_bytes(self, moves: MovesAgain) -> dict[int, int]:
        """By op of the forward whose own value, or a view of it, the backward reads."""
        decisions, shape = self.planning.decisions, self.planning.mesh_shape
        least: dict[tuple[int, int], int] = {}
        for index, output, target in moves.first_late:
            root = moves.roots[index]
            spec = decisions[index].specs[output]
            if decisions[root].kind != "op" or moves.late[root] or root in self.residency.recomputed or spec is None:
                continue
            source = decisions[index].strategies[self.choice[index]].outputs[output]
            whole = int(decisions[root].bytes[self.choice[root]])  # a view may repeat elements
            own = min(whole, *(local_bytes(spec, layout, shape) for layout in (source, target)))
            place = root, output if index == root else 0
            least[place] = min(least.get(place, own), own)
        saved: dict[int, int] = {}
        for (root, _), bytes_ in least.items():
            saved[root] = saved.get(root, 0) + bytes_
        return saved

    def with_residency(self, residency: Residency, seconds: float, measured: Measured | None = None) -> Candidate:
        """The same choice with another residency, which takes `seconds` more than the usual one; measured or not."""
        extra = seconds - self.residency_s
        fresh = replace(
            self,
            solution=replace(self.solution, cost=self.solution.cost + extra),
            foreseen_s=self.foreseen_s + extra,
            residency=residency,
            residency_s=seconds,
        )
        if measured is not None:
            fresh.__dict__["measured"] = measured
        return fresh
