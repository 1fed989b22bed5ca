"""Bytes that moved copies hold beside what a joint problem counts: known from a choice, before anything is emitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from autopar.passes.schedule_collectives import HEAVY_NAMES
from autopar.planner.build import PlanningProblem
from autopar.planner.saved_values import moment
from autopar.search import Problem
from autopar.sharding.strategies import local_bytes

Span = tuple[int, int, float]
"""A half-open interval of moments, and bytes held throughout."""


def peak_with_moves(planning: PlanningProblem, problem: Problem, picks: Sequence[int], choice: Sequence[int]) -> float:
    """Bytes at the peak of a joint problem under `picks`, whose layouts are `choice`, with the copies that are moved.

    A copy lives while its reader runs; one that is larger than what it is made of is gathered one heavy op ahead
    (`passes.schedule_collectives`). An estimate: what the emitted program holds may be more or less.
    """
    usages = [float(usage[pick]) for usage, pick in zip(problem.usages, picks, strict=True)]
    spans = [(low, high, held) for (low, high), held in zip(problem.intervals, usages, strict=True) if held]
    found = np.array([*spans, *_copies(planning, choice)], dtype=np.float64).reshape(-1, 3)
    times = np.concatenate([found[:, 0], found[:, 1]])
    changes = np.concatenate([found[:, 2], -found[:, 2]])
    order = np.lexsort((changes, times))  # what ends at a moment is gone before what begins there
    return float(np.cumsum(changes[order]).max(initial=0.0))


def _copies(planning: PlanningProblem, choice: Sequence[int]) -> Iterator[Span]:
    """Each read of a value in another layout than its own."""
    decisions, shape, count = planning.decisions, planning.mesh_shape, len(planning.decisions)
    heavy: dict[str, int] = {}  # the last heavy op of each phase
    for index, (decision, pick) in enumerate(zip(decisions, choice, strict=True)):
        for source, target in zip(decision.sources, decision.strategies[pick].inputs, strict=True):
            producer = decisions[source.decision]
            own, spec = (
                producer.strategies[choice[source.decision]].outputs[source.output],
                producer.specs[source.output],
            )
            if own == target or spec is None:
                continue
            copied = local_bytes(spec, target, shape)
            is_gathered = copied > local_bytes(spec, own, shape)
            start = heavy.get(decision.phase, index) if is_gathered else index
            yield moment(start, 0, count), moment(index + 1, 0, count), float(copied)
        if decision.call is not None and decision.call.name.split(".")[1] in HEAVY_NAMES:
            heavy[decision.phase] = index
