"""Local search for one layer: moves that take load off the slowest device, until none does.

A placement of a layer is `slots`, int64 [devices, slots per device], the expert in each slot. All replicas of an expert
carry the same load, `load[expert] / count`; a device may hold several. Three kinds of moves, the best one first:
two devices deal out their slots anew, two slots change places, a slot changes its expert (one replica less of
one expert, one more of another). Each makes the loads of all devices that it touches smaller than that of the
slowest, so the search ends.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import numpy as np

from autopar.search.experts.eplb import packed, replica_counts
from autopar.search.experts.inputs import Array

DEALT_SLOTS = 7  # two devices of at most so many slots each try all ways to deal them: 1,716
ROUNDING = 1e-12  # of the slowest device's load: a smaller gain is none


def device_loads(load: Array, slots: Array) -> Array:
    """float64 [devices]."""
    counts = np.bincount(slots.ravel(), minlength=len(load))
    loads: Array = (load / np.maximum(counts, 1))[slots].sum(1)
    return loads


def slowest(load: Array, slots: Array) -> float:
    """The load of the slowest device."""
    return float(device_loads(load, slots).max())


def packed_slots(load: Array, counts: Array, devices: int) -> Array:
    """Replicas by `counts`, the heaviest first to the lightest device with room."""
    experts = np.repeat(np.arange(len(load)), counts)
    device_of = packed((load / counts)[experts], devices)
    slots: Array = experts[np.argsort(device_of, kind="stable")].reshape(devices, -1)
    return slots


def greedy_slots(load: Array, devices: int, slots: int) -> Array:
    """Replicas for the most loaded experts, then `packed_slots`."""
    return packed_slots(load, replica_counts(load, devices * slots), devices)


@cache
def _deals(slots: int) -> Array:
    """bool [ways, 2 slots]: every way to give a device half of the slots of two, the first one to it."""
    rest = itertools.combinations(range(1, 2 * slots), slots - 1)
    ways = [[0, *others] for others in rest]
    table = np.zeros((len(ways), 2 * slots), dtype=bool)
    table[np.arange(len(ways))[:, None], ways] = True
    return table


@dataclass(frozen=True, slots=True)
class Change:
    """New experts for some slots, (device, slot): expert; `worst`: the largest load of a device that it touches."""

    worst: float
    slots: tuple[tuple[tuple[int, int], int], ...]


class Balancer:
    """Holds one layer's placement, and improves it in place."""

    def __init__(self, load: Array, slots: Array) -> None:
        self.load, self.slots = load, slots.copy()
        self.devices, self.per_device = slots.shape
        self._count()

    def _count(self) -> None:
        self.counts = np.bincount(self.slots.ravel(), minlength=len(self.load))
        self._weigh()

    def _weigh(self) -> None:
        self.weights = (self.load / np.maximum(self.counts, 1))[self.slots]
        self.loads = self.weights.sum(1)

    def top(self) -> float:
        """The slowest device's load."""
        return float(self.loads.max())

    def run(self, target: float) -> float:
        """Improve until the slowest device has at most `target`, or no move helps; its load."""
        while self.top() > target and self.step():
            pass
        return self.top()

    def step(self) -> bool:
        """The best move that takes load off the slowest device; False if there is none."""
        slow = int(self.loads.argmax())
        limit = float(self.loads[slow]) * (1 - ROUNDING)
        if self.per_device <= DEALT_SLOTS:
            return self._deal(slow, limit) or self._apply(self._replacement(slow), limit)
        return self._apply(self._swap(slow), limit) or self._apply(self._replacement(slow), limit)

    def step_sparingly(self) -> bool:
        """The same, the move that takes off most for each slot that it changes, and no device dealt out anew."""
        slow = int(self.loads.argmax())
        top = float(self.loads[slow])
        changes = (self._replacement(slow), self._swap(slow))
        best = min(changes, key=lambda change: (change.worst - top) / max(1, len(change.slots)))
        return self._apply(best, top * (1 - ROUNDING))

    def _apply(self, change: Change, limit: float) -> bool:
        """Make a change if it leaves the devices that it touches below the limit."""
        if not change.worst < limit:
            return False
        for slot, expert in change.slots:
            self.slots[slot] = expert
        self._count()
        return True

    def _deal(self, slow: int, limit: float) -> bool:
        """All slots of the slowest and another device, dealt out in the way that leaves the slower of the two least."""
        ways = _deals(self.per_device)
        both = np.concatenate([np.broadcast_to(self.weights[slow], self.weights.shape), self.weights], 1)
        mine = both @ ways.T
        worse = np.maximum(mine, both.sum(1, keepdims=True) - mine)
        worse[slow] = np.inf
        other, way = np.unravel_index(int(worse.argmin()), worse.shape)
        if not worse[other, way] < limit:
            return False
        pooled = np.concatenate([self.slots[slow], self.slots[other]])
        self.slots[slow], self.slots[other] = pooled[ways[way]], pooled[~ways[way]]
        self._weigh()
        return True

    def _swap(self, slow: int) -> Change:
        """A slot of the slowest device against one of another."""
        change = self.weights[None] - self.weights[slow][:, None, None]  # [mine, devices, theirs]: what I get more
        worse = np.maximum(self.loads[slow] + change, self.loads[None, :, None] - change)
        worse[:, slow] = np.inf
        mine, other, theirs = (int(index) for index in np.unravel_index(int(worse.argmin()), worse.shape))
        here, there = (slow, mine), (other, theirs)
        return Change(
            float(worse[mine, other, theirs]),
            ((here, int(self.slots[there])), (there, int(self.slots[here]))),
        )

    def _replacement(self, slow: int) -> Change:
        """One more replica for an expert of the slowest device, in place of one of an expert with several."""
        gainers = np.unique(self.slots[slow])
        gainers = gainers[self.load[gainers] > 0]
        places = np.argwhere(self.counts[self.slots] > 1)
        if not len(gainers) or not len(places):
            return Change(np.inf, ())
        worst = self._after_replacing(gainers, places)
        gainer, place = np.unravel_index(int(worst.argmin()), worst.shape)
        row, column = (int(index) for index in places[place])
        return Change(float(worst[gainer, place]), (((row, column), int(gainers[gainer])),))

    def _after_replacing(self, gainers: Array, places: Array) -> Array:
        """float64 [gainers, places]: the largest load of a device whose load changes, if a gainer gets the place."""
        rows, losers = np.arange(len(places)), self.slots[tuple(places.T)]
        held = np.zeros((len(self.load), self.devices))
        np.add.at(held, (self.slots, np.arange(self.devices)[:, None]), 1.0)
        now = self.load / np.maximum(self.counts, 1)
        up, down = self.load / np.maximum(self.counts - 1, 1), self.load / (self.counts + 1)
        less = held[gainers] * (down - now)[gainers][:, None]  # [gainers, devices]
        more = held[losers] * (up - now)[losers][:, None]  # [places, devices]
        more[rows, places[:, 0]] -= up[losers]
        loads = self.loads + less[:, None] + more
        loads[:, rows, places[:, 0]] += down[gainers][:, None]
        touched = (held[gainers][:, None] > 0) | (held[losers] > 0)
        worst: Array = np.where(touched, loads, -np.inf).max(2)
        worst[gainers[:, None] == losers] = np.inf
        return worst
