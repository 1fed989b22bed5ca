"""The placement of one layer, or of a part of its devices, as an integer program for CP-SAT.

Variables: how many replicas an expert has (one boolean per count), and how many of them each device holds, by count, so
that a device's load is linear in them: sum of load[expert] / count * held.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopar.search.experts.inputs import Array

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

RESOLUTION = 2**40  # steps of the integer loads in the largest one, where they are not whole multiples already
LARGEST_UNIT = 2**44  # of integer loads


@dataclass(frozen=True, slots=True)
class Part:
    """Some devices of a layer, and what stands on them.

    `load` float64 [experts] of the experts there; `fixed` int64 [experts]: all replicas of an expert that also stands
    elsewhere, whose number must stay, 0 where it is free; `slots` int64 [devices, slots] by position in `load`.
    """

    load: Array
    fixed: Array
    slots: Array


@dataclass(frozen=True, slots=True)
class Moves:
    """What a change costs: `held` bool [experts, devices] is there already, any other expert costs `cost` of load."""

    held: Array
    cost: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The best slots found, and a proven bound of the objective; `slots` is None where nothing better was found."""

    slots: Array | None
    bound: float


def part_of(load: Array, slots: Array, devices: Array) -> tuple[Part, Array]:
    """The part of a layer that some devices are, and the experts' numbers by position in it."""
    experts = np.unique(slots[devices])
    inside = np.bincount(slots[devices].ravel(), minlength=len(load))
    counts = np.bincount(slots.ravel(), minlength=len(load))
    fixed = np.where(inside < counts, counts, 0)[experts]
    return Part(load[experts], fixed, np.searchsorted(experts, slots[devices])), experts


def whole_layer(load: Array, slots: Array) -> Part:
    """All devices, no count fixed."""
    return Part(load, np.zeros(len(load), dtype=np.int64), slots)


def solve_part(
    part: Part, *, effort: float, time_limit_s: float, reach: int | None = None, moves: Moves | None = None
) -> Answer:
    """Minimise the slowest device's load, plus the cost of moves, from the given slots.

    `effort` limits the search in CP-SAT's deterministic time, so that the answer is the same on every run that
    `time_limit_s` does not cut short. `reach`: free counts stay so near to what they are; None: any count.
    """
    from ortools.sat.python import cp_model  # loads pandas, which few plans need

    if time_limit_s <= 0:
        return Answer(None, 0.0)
    model = _Model(part, reach, moves)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort
    solver.parameters.max_time_in_seconds = time_limit_s
    status = solver.solve(model.cp)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Answer(model.slots(solver) if found else None, model.to_load(solver.best_objective_bound))


def whole_units(load: Array, largest_count: int) -> float:
    """Units of load per step of the integers: so that load / count is whole for every count, if that is possible."""
    scale = math.lcm(*range(1, largest_count + 1)) if largest_count <= 30 else 0
    whole = bool((load == np.rint(load)).all()) and 0 < float(load.max()) * scale <= LARGEST_UNIT
    return 1 / scale if whole else max(float(load.max()), 1e-300) / RESOLUTION


class _Model:
    """The integer program of a part."""

    def __init__(self, part: Part, reach: int | None, moves: Moves | None) -> None:
        from ortools.sat.python import cp_model  # loads pandas, which few plans need

        self.part, self.moves = part, moves
        self.devices, self.per_device = part.slots.shape
        self.now = np.zeros((len(part.load), self.devices), dtype=np.int64)
        np.add.at(self.now, (part.slots, np.arange(self.devices)[:, None]), 1)
        self.cp = cp_model.CpModel()
        self.ranges = [self._counts(expert, reach) for expert in range(len(part.load))]
        largest = max(int(counts[-1]) for counts in self.ranges)
        self.unit = whole_units(part.load, max(largest, 1))
        self.copies: list[list[tuple[int, list[cp_model.IntVar]]]] = []  # by expert: (count, copies by device)
        for expert, counts in enumerate(self.ranges):
            self.copies.append(self._add_expert(expert, counts))
        self._add_devices()

    def _counts(self, expert: int, reach: int | None) -> list[int]:
        """Counts that an expert may have."""
        if self.part.fixed[expert]:
            return [int(self.part.fixed[expert])]
        free = [other for other in range(len(self.part.load)) if not self.part.fixed[other]]
        spare = int(self.now[free].sum()) - len(free)
        now = int(self.now[expert].sum())
        low, high = (1, 1 + spare) if reach is None else (max(1, now - reach), min(1 + spare, now + reach))
        return list(range(low, high + 1))

    def _add_expert(self, expert: int, counts: list[int]) -> list[tuple[int, list[cp_model.IntVar]]]:
        inside = int(self.now[expert].sum())
        chosen = [self.cp.new_bool_var("") for _ in counts]
        self.cp.add_exactly_one(chosen)
        rows = []
        for count, is_chosen in zip(counts, chosen, strict=True):
            here = inside if self.part.fixed[expert] else count
            most = min(here, self.per_device)
            row = [self.cp.new_int_var(0, most, "") for _ in range(self.devices)]
            self.cp.add(sum(row) == here * is_chosen)
            for device, held in enumerate(row):
                self.cp.add_hint(held, int(self.now[expert, device]) if here == inside else 0)
            self.cp.add_hint(is_chosen, here == inside)
            rows.append((count, row))
        return rows

    def _add_devices(self) -> None:
        loads = []
        for device in range(self.devices):
            held = [
                (row[device], self._steps(expert, count))
                for expert, rows in enumerate(self.copies)
                for count, row in rows
            ]
            self.cp.add(sum(copies for copies, _ in held) == self.per_device)
            loads.append(sum(copies * steps for copies, steps in held))
        now = self._slowest_now()
        top = self.cp.new_int_var(0, now, "")
        for load in loads:
            self.cp.add(load <= top)
        self.cp.add_hint(top, now)
        if self.moves is None:
            self._break_symmetry()
            self.cp.minimize(top)
        else:
            self.cp.minimize(top + self._move_cost(self.moves))

    def _steps(self, expert: int, count: int) -> int:
        return round(float(self.part.load[expert]) / count / self.unit)

    def _slowest_now(self) -> int:
        totals = [int(self.part.fixed[e]) or int(row.sum()) for e, row in enumerate(self.now)]
        weights = [self._steps(expert, count) for expert, count in enumerate(totals)]
        return int(max((self.now[:, device] * np.array(weights, dtype=object)).sum() for device in range(self.devices)))

    def _break_symmetry(self) -> None:
        """Devices are alike: the copies of the most loaded expert do not increase from one to the next."""
        heaviest = int(self.part.load.argmax())
        held = [sum(row[device] for _, row in self.copies[heaviest]) for device in range(self.devices)]
        for first, second in itertools.pairwise(held):
            self.cp.add(first >= second)

    def _move_cost(self, moves: Moves) -> cp_model.LinearExprT:
        arrived = []
        for expert, rows in enumerate(self.copies):
            for device in np.flatnonzero(~moves.held[expert]):
                arrives = self.cp.new_bool_var("")
                self.cp.add(sum(row[device] for _, row in rows) <= self.per_device * arrives)
                arrived.append(arrives)
        return sum(arrived) * max(1, round(moves.cost / self.unit))

    def slots(self, solver: cp_model.CpSolver) -> Array:
        """The solution, int64 [devices, slots]."""
        rows = []
        for device in range(self.devices):
            held = [sum(solver.value(row[device]) for _, row in rows) for rows in self.copies]
            rows.append(np.repeat(np.arange(len(held)), held))
        return np.stack(rows)

    def to_load(self, steps: float) -> float:
        """A bound of the integer program in units of load, less what rounding may have added."""
        rounding = 0.0 if self.unit == 1 / round(1 / self.unit) else 0.5 * self.per_device
        return max(0.0, (steps - rounding) * self.unit)
