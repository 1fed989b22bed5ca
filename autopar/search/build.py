"""Problem to network: classes folded into one node each, costs in whole quanta, usage only where it can bind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import InfeasibleProblemError
from autopar.search.network import Array, Loads, Network
from autopar.search.problem import FORBIDDEN, Problem

_EXACT_BITS = 52  # sums of this many bits are exact in float64


@dataclass(frozen=True, slots=True)
class Built:
    """A network, and the network node that decides each node of the problem."""

    network: Network
    node_of: tuple[int, ...]

    def choice(self, labels: Array) -> tuple[int, ...]:
        """The problem's choice from one label per network node."""
        return tuple(int(labels[node]) for node in self.node_of)


def build_network(problem: Problem) -> Built:
    """Fold classes (exactly) and drop the usage that cannot bind; raises where the least usages do not fit.

    A class becomes one node: costs add up, an edge inside a class becomes the diagonal of its matrix, and every
    member keeps its own interval with the class's choice.
    """
    node_of = _class_nodes(problem)
    sizes = [0] * (max(node_of, default=-1) + 1)
    for node, place in enumerate(node_of):
        sizes[place] = len(problem.costs[node])
    arrays = [*problem.costs, *problem.edge_costs]
    quanta, quantum = _in_quanta(arrays)
    network = Network(sizes, quantum)
    network.rounding = 0.0 if quantum == 1.0 else 0.5 * len(arrays)
    for (place, own), times in Counter(zip(node_of, map(id, problem.costs), strict=True)).items():
        network.unary[place] = network.unary[place] + times * quanta[own]
    ends = ((node_of[first], node_of[second]) for first, second in problem.edges)
    for ((first, second), own), times in Counter(zip(ends, map(id, problem.edge_costs), strict=True)).items():
        if first == second:
            network.unary[first] = network.unary[first] + times * quanta[own].diagonal()
        else:
            network.link(first, second, times * quanta[own])
    _load(network, problem, node_of)
    return Built(network, node_of)


def _class_nodes(problem: Problem) -> tuple[int, ...]:
    if problem.groups is None:
        return tuple(range(len(problem.costs)))
    place_of: dict[int, int] = {}
    return tuple(place_of.setdefault(group, len(place_of)) for group in problem.groups)


def _in_quanta(arrays: Sequence[Array]) -> tuple[dict[int, Array], float]:
    """By id: costs as whole multiples of a quantum, so that every later sum and difference is exact."""
    if not arrays:
        return {}, 1.0
    different = {id(array): array for array in arrays}  # repeated layers share their arrays
    times = Counter(map(id, arrays))
    flat = np.concatenate([array.reshape(-1) for array in different.values()])
    forbidden = flat >= FORBIDDEN
    flat[forbidden] = 0.0
    starts = np.cumsum([0, *(array.size for array in different.values())])
    greatest = np.maximum.reduceat(np.abs(flat), starts[:-1])
    total = float(greatest @ np.array([times[own] for own in different], dtype=np.float64))
    quantum = 1.0
    if total >= 2.0**_EXACT_BITS or bool((flat != np.floor(flat)).any()):
        quantum = 2.0 ** (math.ceil(math.log2(total)) - _EXACT_BITS)
        flat = np.round(flat / quantum)
    flat[forbidden] = np.inf
    parts = {
        own: flat[start:stop].reshape(array.shape)
        for start, stop, (own, array) in zip(starts[:-1].tolist(), starts[1:].tolist(), different.items(), strict=True)
    }
    return parts, quantum


def maximal_times(intervals: Sequence[tuple[int, int]]) -> Array:
    """The times at which the live set is maximal: the last start before each run of ends."""
    starts = np.unique([low for low, high in intervals if low < high])
    ends = np.unique([high for low, high in intervals if low < high])
    if not len(starts):
        return np.zeros(0, dtype=np.int64)
    before = np.searchsorted(starts, ends, side="left") - 1  # the last start strictly before each end
    times: Array = np.unique(starts[before])
    return times


def _load(network: Network, problem: Problem, node_of: tuple[int, ...]) -> None:
    if problem.usage_limit is None or not math.isfinite(problem.usage_limit):
        return
    times = maximal_times(problem.intervals)
    network.times = times
    network.capacity = np.full(len(times), float(problem.usage_limit))
    first = np.searchsorted(times, [low for low, _ in problem.intervals], side="left")
    last = np.searchsorted(times, [max(low, high) for low, high in problem.intervals], side="left")
    parts: dict[int, list[Loads]] = {}
    for node, place in enumerate(node_of):
        if first[node] < last[node]:
            amounts = np.asarray(problem.usages[node], dtype=np.float64)[None, :]
            labels = network.labels[place]
            parts.setdefault(place, []).append(Loads(first[node : node + 1], last[node : node + 1], amounts, labels))
    if not network.store_loads(parts):
        raise tight_interval(problem, network.tight_times)


def tight_interval(problem: Problem, times: Array) -> InfeasibleProblemError:
    """The error that names the interval of time at which no choice fits."""
    events = sorted({time for interval in problem.intervals for time in interval})
    after = int(np.searchsorted(events, times[-1], side="right"))
    end = events[after] if after < len(events) else int(times[-1]) + 1
    where = f"time [{int(times[0])}, {end})"
    return InfeasibleProblemError(
        f"no choice fits {problem.usage_limit:.15g} in use",
        where=where,
        fix="raise the usage limit, or offer strategies that use less there",
    )
