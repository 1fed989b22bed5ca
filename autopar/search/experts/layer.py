"""The least load of the slowest device in one layer: starts, local search, then the integer program."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autopar.search.experts.balance import Balancer, greedy_slots, packed_slots, slowest
from autopar.search.experts.bound import load_bound
from autopar.search.experts.eplb import replica_counts
from autopar.search.experts.exact import part_of, solve_part, whole_layer
from autopar.search.experts.inputs import Array

GOOD = 5e-4  # a share of the bound: nearer than routing repeats itself from step to step
WORTH_SOLVING = 1e-3  # a share of the bound: within it, the integer program has nothing to win
SMALL = 4000  # booleans of the integer program of a whole layer that is worth trying
EXCHANGES = 400  # of a replica from one expert to another that are worth trying, each a start of its own
PART = 4  # devices whose slots the integer program deals out anew
PART_EFFORT = 0.1  # of CP-SAT's deterministic time, for each of them
STALE = 6  # parts in a row that gave nothing
DIVISORS = (-0.25, -0.5, 0.5, 1.0)  # added to an expert's count: below 0 favours hot experts less, above more
POWERS = (0.85, 1.2)  # of the loads that decide the counts


@dataclass(frozen=True, slots=True)
class Effort:
    """How much work one layer may take: CP-SAT's deterministic time, and the moment to stop at any rate."""

    solver: float
    deadline: float  # of time.monotonic()

    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


def balance_layer(load: Array, devices: int, slots: int, effort: Effort, seed: int) -> tuple[Array, float]:
    """(slots [devices, slots], a proven lower bound of the slowest device's load) for `load` [experts].

    The first start is the usual greedy, so that the answer is never worse than it.
    """
    bound = load_bound(load, devices, slots)
    target = bound * (1 + GOOD)
    best, least = None, np.inf
    for start in starts(load, devices, slots):
        balancer = Balancer(load, start)
        top = balancer.run(target)
        if top < least:
            best, least = balancer.slots, top
        if least <= target or effort.left_s() == 0:
            break
    assert best is not None
    if least > bound and integer_size(load, devices, slots) <= SMALL:
        answer = solve_part(whole_layer(load, best), effort=effort.solver, time_limit_s=effort.left_s())
        if answer.slots is not None and slowest(load, answer.slots) < least:
            best = answer.slots
        return best, max(bound, answer.bound)
    if least > bound * (1 + WORTH_SOLVING):
        best = improve_parts(load, best, target, effort, seed)
    return best, bound


def integer_size(load: Array, devices: int, slots: int) -> int:
    """About how many variables the integer program of a whole layer has."""
    return len(load) * devices * (devices * slots - len(load) + 1)


def starts(load: Array, devices: int, slots: int) -> Iterator[Array]:
    """Packed placements with replica counts by several rules."""
    yield greedy_slots(load, devices, slots)
    if devices * slots == len(load):
        return
    for shift in DIVISORS:
        yield packed_slots(load, shifted_counts(load, devices * slots, shift), devices)
    for power in POWERS:
        yield packed_slots(load, replica_counts(load**power, devices * slots), devices)
    counts = replica_counts(load, devices * slots)
    losers = np.flatnonzero(counts > 1)
    if len(losers) * len(load) > EXCHANGES:
        return
    for loser, gainer in itertools.product(losers, range(len(load))):
        if loser != gainer:
            changed = counts.copy()
            changed[loser] -= 1
            changed[gainer] += 1
            yield packed_slots(load, changed, devices)


def shifted_counts(load: Array, replicas: int, shift: float) -> Array:
    """int64 [experts]: one replica more, each time, of the expert of the largest load / (count + shift)."""
    counts = np.ones(len(load), dtype=np.int64)
    for _ in range(replicas - len(load)):
        counts[int((load / (counts + shift)).argmax())] += 1
    return counts


def improve_parts(load: Array, slots: Array, target: float, effort: Effort, seed: int) -> Array:
    """Large-neighbourhood search: the slowest device and some others, dealt out anew by the integer program."""
    random, stale, spent = np.random.default_rng(seed), 0, 0.0
    balancer = Balancer(load, slots)
    while balancer.run(target) > target and stale < STALE and spent < effort.solver and effort.left_s() > 0:
        devices = chosen_devices(balancer.loads, random)
        part, experts = part_of(load, balancer.slots, devices)
        answer = solve_part(part, effort=PART_EFFORT, time_limit_s=effort.left_s(), reach=2)
        spent, stale = spent + PART_EFFORT, stale + 1
        if answer.slots is None:
            continue
        tried = balancer.slots.copy()
        tried[devices] = experts[answer.slots]
        if sorted(Balancer(load, tried).loads)[::-1] < sorted(balancer.loads)[::-1]:
            balancer, stale = Balancer(load, tried), 0
    return balancer.slots


def chosen_devices(loads: Array, random: np.random.Generator) -> Array:
    """int64: the slowest device, the fastest, and others by chance."""
    order = np.argsort(-loads, kind="stable")
    others = random.permutation(order[1:-1])[: max(0, PART - 2)]
    return np.unique(np.concatenate([order[:1], order[-1:], others]))
