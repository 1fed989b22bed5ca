"""Experts placed anew over the groups of ranks that hold them: a question to the search."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.search.experts.place import place_experts


def place_anew(
    load: Sequence[Sequence[float]],
    current: Sequence[Sequence[Sequence[int]]],
    *,
    move_cost: float,
    time_limit_s: float,
) -> list[tuple[tuple[int, ...], ...]]:
    """By layer, which experts each group of ranks is to hold, as many as it does in `current`.

    `load`: [layers, experts]. `move_cost`: the load that an expert must take off the slowest group to be moved.
    """
    placement = place_experts(load, (len(current[0]),), current=current, move_cost=move_cost, time_limit_s=time_limit_s)
    return [tuple(map(tuple, layer)) for layer in placement.assignment.tolist()]
