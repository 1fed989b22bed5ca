"""What a choice costs and what it breaks, straight from the definition: no solver shares this code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from autopar.search.problem import FORBIDDEN, Problem


def evaluate(problem: Problem, choice: Sequence[int]) -> float:
    """The exact total cost, rounded once; `math.inf` for a choice that `violations` objects to."""
    if next(iter(violations(problem, choice)), None) is not None:
        return math.inf
    return cost_of(problem, choice)


def cost_of(problem: Problem, choice: Sequence[int]) -> float:
    """Node costs plus edge costs, summed exactly, whatever the choice violates."""
    terms = [float(costs[pick]) for costs, pick in zip(problem.costs, choice, strict=True)]
    for (first, second), matrix in zip(problem.edges, problem.edge_costs, strict=True):
        terms.append(float(matrix[choice[first], choice[second]]))
    return math.fsum(terms)


def violations(problem: Problem, choice: Sequence[int]) -> tuple[str, ...]:
    """Everything that makes the choice infeasible, in words; empty when it is feasible."""
    if len(choice) != len(problem.costs):
        return (f"{len(choice)} choices for {len(problem.costs)} nodes",)
    outside = [
        f"node {node}: strategy {pick} of {len(costs)}"
        for node, (costs, pick) in enumerate(zip(problem.costs, choice, strict=True))
        if not 0 <= pick < len(costs)
    ]
    if outside:
        return tuple(outside)
    return (
        *_forbidden_nodes(problem, choice),
        *_forbidden_edges(problem, choice),
        *_split_groups(problem, choice),
        *_over_the_limit(problem, choice),
    )


def usage_profile(problem: Problem, choice: Sequence[int]) -> list[tuple[int, int | Fraction]]:
    """(time, total usage from that time on) at every time where it changes, exactly."""
    changes: dict[int, int | Fraction] = {}
    for (low, high), usages, pick in zip(problem.intervals, problem.usages, choice, strict=True):
        if low >= high:
            continue
        amount = _exact(float(usages[pick]))
        changes[low] = changes.get(low, 0) + amount
        changes[high] = changes.get(high, 0) - amount
    profile: list[tuple[int, int | Fraction]] = []
    total: int | Fraction = 0
    for time in sorted(changes):
        total += changes[time]
        profile.append((time, total))
    return profile


def _exact(value: float) -> int | Fraction:
    return int(value) if value.is_integer() else Fraction(value)


def _forbidden_nodes(problem: Problem, choice: Sequence[int]) -> list[str]:
    return [
        f"node {node}: strategy {pick} is forbidden"
        for node, (costs, pick) in enumerate(zip(problem.costs, choice, strict=True))
        if costs[pick] >= FORBIDDEN
    ]


def _forbidden_edges(problem: Problem, choice: Sequence[int]) -> list[str]:
    return [
        f"edge {edge}: strategies {choice[first]} of node {first} and {choice[second]} of node {second} are forbidden"
        for edge, ((first, second), matrix) in enumerate(zip(problem.edges, problem.edge_costs, strict=True))
        if matrix[choice[first], choice[second]] >= FORBIDDEN
    ]


def _split_groups(problem: Problem, choice: Sequence[int]) -> list[str]:
    if problem.groups is None:
        return []
    pick_of: dict[int, int] = {}
    return [
        f"node {node}: strategy {pick}, where its class {group} has {pick_of[group]}"
        for node, (group, pick) in enumerate(zip(problem.groups, choice, strict=True))
        if pick_of.setdefault(group, pick) != pick
    ]


def _over_the_limit(problem: Problem, choice: Sequence[int]) -> list[str]:
    if problem.usage_limit is None:
        return []
    limit = _exact(float(problem.usage_limit)) if math.isfinite(problem.usage_limit) else None
    if limit is None:
        return []
    profile = usage_profile(problem, choice)
    peak_time, peak = max(profile, key=lambda entry: entry[1], default=(0, 0))
    if peak <= limit:
        return []
    return [f"time {peak_time}: usage {float(peak):.15g} is over the limit {problem.usage_limit:.15g}"]
