"""Layers of experts whose backward reads what the forward has: rows that came, and arguments of the activation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, prod

from autopar.ops.dispatch import expected_copies
from autopar.planner.decisions import Decision
from autopar.planner.prices import EXPERTS_BACKWARD
from autopar.sharding.layout import local_shape
from autopar.sharding.rules.experts import ALL_TO_ALL, INDEX, OWN_EXPERTS, SCORES, UP

FORWARD = "autopar.experts.default"


def is_backward(decision: Decision) -> bool:
    """Whether a decision is the backward of a layer of experts."""
    return decision.call is not None and decision.call.name == EXPERTS_BACKWARD


def kept_pairs(decisions: Sequence[Decision], choice: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(backward, forward) of the layers that have the same inputs in the same layouts, and go the same ways."""
    forwards: dict[object, int] = {}
    for index, (decision, pick) in enumerate(zip(decisions, choice, strict=True)):
        if decision.call is None or decision.call.name not in (FORWARD, EXPERTS_BACKWARD):
            continue
        strategy, begin = decision.strategies[pick], int(is_backward(decision))
        forms = tuple(rule.form for rule in strategy.rules)
        activation = tuple(item for item in decision.call.args[begin:] if isinstance(item, (str, int)))[:2]
        key = decision.sources[begin:], strategy.inputs[begin:], forms, activation
        if not begin:
            forwards.setdefault(key, index)
        elif key in forwards:
            yield index, forwards[key]


def kept_bytes(decision: Decision, pick: int, mesh_shape: Sequence[int]) -> int:
    """What the forward of a layer keeps for its backward on one rank, choices spread evenly over the experts: arguments
    of the activation, and what came with the tokens of other ranks."""
    assert decision.call is not None
    strategy, specs = decision.strategies[pick], decision.call.inputs
    shapes = [local_shape(spec.shape, layout, mesh_shape) for spec, layout in zip(specs, strategy.inputs, strict=True)]
    ways = prod(mesh_shape[axis] for axis in strategy.axes_with(OWN_EXPERTS))
    held = ceil(prod(shapes[INDEX]) / ways) * prod(shapes[UP][1:3]) * specs[UP].dtype.itemsize
    trips = strategy.axes_with(ALL_TO_ALL)
    if not trips:
        return held
    rows = shapes[INDEX][0] * prod(expected_copies(shapes[INDEX][1], mesh_shape[axis]) for axis in trips)
    return held + int(rows * sum(spec.nbytes // max(1, spec.shape[0]) for spec in specs[: SCORES + 1]))
