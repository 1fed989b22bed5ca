"""Re-placement: between what stands and what would be best, layer by layer, what the moves are worth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.search.experts.balance import Balancer, greedy_slots, slowest
from autopar.search.experts.changes import (
    held_experts,
    matched_to_current,
    matched_within_nodes,
    moved_experts,
)
from autopar.search.experts.exact import Moves, solve_part, whole_layer
from autopar.search.experts.inputs import Array, Question
from autopar.search.experts.layer import Effort

STEPS = 400  # of the local search from the current placement
SAME = 1e-3  # of the mean load: two slowest devices so near to each other are equally good, and fewer moves decide
SMALL_MOVES = 2000  # experts * devices * counts up to which the integer program decides


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to place a layer."""

    slots: Array
    top: float  # load of the slowest device
    moves: int


def keep_what_is_worth_it(
    question: Question, layers: list[Array], bounds: Array, move_cost: float, effort: Effort
) -> list[Array]:
    """For each layer the placement of least load of the slowest device plus `move_cost` for each moved expert.

    `bounds` [layers] of that load; `effort` is for each layer, its deadline for all.
    """
    return [
        best_for_layer(question, layer, fresh, float(bounds[layer]), move_cost, effort)
        for layer, fresh in enumerate(layers)
    ]


def best_for_layer(
    question: Question, layer: int, fresh: Array, bound: float, move_cost: float, effort: Effort
) -> Array:
    """Of the fresh placement, the current one and those on the way from the current one to a better one."""
    assert question.current is not None
    load, current = question.load[layer], question.current[layer]
    experts, devices = len(load), question.cluster.devices
    if question.affinity is None:
        matched = matched_to_current(fresh, current, experts)
    else:
        matched = matched_within_nodes(fresh, current, experts, question.cluster)
    candidates = [_candidate(load, matched, current)]
    if question.affinity is None and current.shape == fresh.shape and len(np.unique(current)) == experts:
        candidates += way_from(load, current)
        best = min(item.top + move_cost * item.moves for item in candidates)
        if best > bound + SAME * load.sum() / devices:
            candidates += solved(load, candidates, current, move_cost, effort)
    worst = slowest(load, greedy_slots(load, devices, question.slots)) if move_cost == 0 else np.inf
    allowed = [item for item in candidates if item.top <= max(worst, candidates[0].top)]
    least = min(item.top + move_cost * item.moves for item in allowed)
    near = [item for item in allowed if item.top + move_cost * item.moves <= least + SAME * load.sum() / devices]
    return min(near, key=lambda item: (item.moves, item.top)).slots


def _candidate(load: Array, slots: Array, current: Array) -> Candidate:
    return Candidate(slots, slowest(load, slots), moved_experts(slots, current, len(load)))


def way_from(load: Array, current: Array) -> list[Candidate]:
    """The current placement, and what it becomes move by move, each the one that saves most for an expert moved."""
    balancer = Balancer(load, current)
    found = [_candidate(load, current, current)]
    while len(found) <= STEPS and balancer.step_sparingly():
        found.append(_candidate(load, balancer.slots.copy(), current))
    return found


def solved(
    load: Array, candidates: list[Candidate], current: Array, move_cost: float, effort: Effort
) -> list[Candidate]:
    """The integer program's answer, moves included, where it is small."""
    replicas = current.size
    if len(load) * len(current) * (replicas - len(load) + 1) > SMALL_MOVES:
        return []
    start = min(candidates, key=lambda item: item.top + move_cost * item.moves)
    moves = Moves(held_experts(current, len(load)), move_cost)
    part = whole_layer(load, start.slots)
    answer = solve_part(part, effort=effort.solver, time_limit_s=effort.left_s(), moves=moves)
    return [] if answer.slots is None else [_candidate(load, answer.slots, current)]
