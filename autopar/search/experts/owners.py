"""Who owns an expert that several devices compute: each device equally many, if it can be one that computes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.search.experts.changes import assigned

ELSEWHERE, MOVED = 2.0, 1.0  # an owner that computes others alone costs in each step, one that is new costs once


def choose_owners(computed: Sequence[Sequence[int]], owned: Sequence[Sequence[int]]) -> list[list[int]]:
    """By device, the experts that it is to own, of those that it computes, or owns now, where that can be.

    Every expert gets one owner; each device owns as many as it does now, in `owned`, equally many on each. Of all such
    choices, one with the fewest owners that do not compute their expert, then with the fewest that are new.

    >>> choose_owners([[0, 1, 2], [0, 2, 3]], [[0, 3], [1, 2]])
    [[0, 1], [2, 3]]
    """
    experts, size = sum(map(len, owned)), len(owned[0])
    cost = np.full((len(owned), experts), ELSEWHERE + MOVED)
    for device, (slots, own) in enumerate(zip(computed, owned, strict=True)):
        cost[device, list(set(slots))] -= ELSEWHERE
        cost[device, list(own)] -= MOVED
    rows, columns = assigned(np.repeat(cost, size, axis=0))
    found: list[list[int]] = [[] for _ in owned]
    for row, expert in zip(rows, columns, strict=True):
        found[row // size].append(int(expert))
    return [sorted(group) for group in found]
