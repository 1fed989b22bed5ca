"""An order of the nodes in which many neighbours-free nodes stand side by side: what makes sweeps fast in numpy.

Message passing and dynamic programming walk the nodes in an order. Nodes that no chain of later-than relations connects
can be handled by one call; the order decides how many such levels there are. The execution order gives long chains and
as many levels; here it is cut into blocks that are walked at the same time.
"""

from __future__ import annotations

import numpy as np

from autopar.search.network import Array
from autopar.search.tables import Tables

NODES_PER_BLOCK = 40


class Sweep:
    """Levels of a block order over the places of a network: arcs lead from a lower level to a higher one."""

    def __init__(self, tables: Tables, count: int, blocks: int) -> None:
        order = block_order(count, blocks)
        turn = np.empty(count, dtype=np.int64)
        turn[order] = np.arange(count)
        forward = turn[tables.tail] < turn[tables.head]
        arcs = np.flatnonzero(forward)
        level = _levels(order, tables.tail[arcs], tables.head[arcs])
        self.depth = int(level.max(initial=-1)) + 1
        self.places = np.lexsort((turn, level))  # level by level
        self.bounds = np.searchsorted(level[self.places], np.arange(self.depth + 1))
        self.slot = np.empty(count, dtype=np.int64)  # per place: where it stands within its level
        self.slot[self.places] = np.arange(count) - self.bounds[level[self.places]]
        head_level = level[tables.head[arcs]]
        self.arcs = arcs[np.lexsort((turn[tables.tail[arcs]], turn[tables.head[arcs]], head_level))]  # by head
        self.arc_bounds = np.searchsorted(level[tables.head[self.arcs]], np.arange(self.depth + 1))
        self.level, self.turn = level, turn


def block_order(count: int, blocks: int) -> Array:
    """Places in the order of a walk through all blocks at once; every second block is walked from its end."""
    blocks = max(1, min(blocks, count))
    places = np.arange(count)
    block = places * blocks // max(1, count)
    first = np.searchsorted(block, np.arange(blocks + 1))
    step = np.where(block % 2 == 1, first[block + 1] - 1 - places, places - first[block])
    return np.lexsort((block, step))


def _levels(order: Array, tails: Array, heads: Array) -> Array:
    """Per place: the most arcs on a way to it."""
    level = [0] * len(order)
    before: list[list[int]] = [[] for _ in range(len(order))]
    for tail, head in zip(tails.tolist(), heads.tolist(), strict=True):
        before[head].append(tail)
    for place in order.tolist():
        if before[place]:
            level[place] = 1 + max([level[other] for other in before[place]])
    return np.array(level, dtype=np.int64)
