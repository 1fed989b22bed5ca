"""How short the longest stage of any cut can be, and a cut that has such a longest stage.

By bisection on that length: for each, the fewest devices whose stages are no longer. This sees neither how many
microbatches are in flight nor what else a step costs, so it bounds every cut; where only the longest stage counts, its
cut is the best.
"""

from __future__ import annotations

import numpy as np

from autopar.search.stage_problem import Cut, Numbers, StageProblem

ROUNDS = 60  # of bisection: to the last bit, nearly


def least_work(problem: StageProblem) -> float:
    """Seconds of one microbatch through all stages, each layer where it is fastest: what filling a pipeline takes."""
    return float(np.min([option.work_s for option in problem.options], axis=0).sum())


def step_bound(problem: StageProblem, longest_s: float) -> float:
    """No cut takes a shorter step, if none has a longest stage shorter than this."""
    if problem.asynchronous:
        return longest_s
    return (problem.microbatches - 1) * longest_s + least_work(problem)


def shortest_longest(problem: StageProblem) -> tuple[Cut | None, float]:
    """A cut whose longest stage or transfer is shortest, and a bound on that of every cut.

    For devices of one kind; for several, no cut, and the bound 0.
    """
    kinds = {option.kind for option in problem.options}
    if len(kinds) > 1:
        return None, 0.0
    available = dict(problem.device_counts).get(kinds.pop(), 0)
    tables = _Tables(problem)
    high = max(float((option.work_s + option.sync_s).sum()) for option in problem.options)
    high = max(high, float(tables.sends.max()))
    best, low = tables.fewest_devices(high, available), 0.0
    if best is None:
        return None, 0.0
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        cut = tables.fewest_devices(middle, available)
        low, high, best = (middle, high, best) if cut is None else (low, middle, cut)
    return best, low


class _Tables:
    """Seconds of every interval of layers, by option; infinite where one microbatch does not fit."""

    def __init__(self, problem: StageProblem) -> None:
        self.problem, self.layers = problem, problem.layers
        self.seconds = [self._seconds(number) for number in range(len(problem.options))]
        self.sends = np.array([2 * (it.send_latency_s + problem.crossing_bytes / it.send_bytes_per_s)
                               for it in problem.options])  # fmt: skip
        self.sends[:, -1] = 0.0  # the last stage sends nothing

    def fewest_devices(self, longest_s: float, available: int) -> Cut | None:
        """A path whose stages and sends all take at most this, with the fewest devices; None if they are too few."""
        least = np.full(self.layers + 1, np.inf)
        least[0] = 0
        source = np.zeros(self.layers + 1, dtype=np.int64)
        chosen = np.zeros(self.layers + 1, dtype=np.int64)
        passes = self.sends <= longest_s
        for first in range(self.layers):
            if least[first] >= available:
                continue
            for number, option in enumerate(self.problem.options):
                fits = (self.seconds[number][first, first:] <= longest_s) & passes[number, first:]
                ends = first + 1 + np.flatnonzero(fits)
                better = ends[least[ends] > least[first] + option.devices]
                least[better], source[better], chosen[better] = least[first] + option.devices, first, number
        if least[self.layers] > available:
            return None
        ends_found: list[int] = [self.layers]
        while source[ends_found[-1]]:
            ends_found.append(int(source[ends_found[-1]]))
        ends_found.reverse()
        return Cut(tuple(ends_found), tuple(int(chosen[end]) for end in ends_found))

    def _seconds(self, number: int) -> Numbers:
        option = self.problem.options[number]
        each_s = option.work_s + option.sync_s if self.problem.asynchronous else option.work_s
        held = 1 if self.problem.in_flight != "all" else self.problem.microbatches
        total = _intervals(each_s)
        peak = _intervals(option.fixed_bytes + held * option.activation_bytes)
        total[peak > option.memory_bytes * (1 + 1e-9)] = np.inf
        return total


def _intervals(each: Numbers) -> Numbers:
    """Sums from each layer to each: row the first, column the last of an interval."""
    sums = np.concatenate([[0.0], np.cumsum(each)])
    table: Numbers = sums[None, 1:] - sums[:-1, None]
    return table
