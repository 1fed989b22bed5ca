"""The exact end of the search: what is left of a network goes to elimination, or to the marginal ILP."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from autopar.search.elimination import Elimination
from autopar.search.lagrangian import worst_times
from autopar.search.marginal import MarginalModel
from autopar.search.mathopt import solve_linear
from autopar.search.network import Array, Network


@dataclass(frozen=True, slots=True)
class Exact:
    """What is proven about a network, in quanta."""

    positions: dict[int, int] | None  # the best choice seen that fits the capacities
    bound: float  # inf: nothing fits
    tight: tuple[int, ...] = ()  # time points that nothing fits, where that is proven


def solve_without_capacities(network: Network, *, max_cells: float = 2e6) -> tuple[float, dict[int, int]] | None:
    """The optimum (quanta, positions) with capacities left out, or None where the network is too wide for that."""
    elimination = Elimination.plan(network, max_cells=max_cells)
    return None if elimination is None else elimination.minimise()


def fits(network: Network, positions: dict[int, int]) -> bool:
    """Whether the choice keeps all capacities."""
    return not bool((network.usage_of(positions) > network.capacity).any())


class MarginalSearch:
    """The marginal ILP with usage rows that enter when they are broken; `run` may be called again with more time."""

    def __init__(self, network: Network, seed: int, times: Array | None = None) -> None:
        self.network, self.seed = network, seed
        self.model = MarginalModel(network)
        self.bound = -math.inf
        self.is_integer = False
        self.batch = 8  # usage rows that enter together; neighbouring ones are much alike, and slow the solver
        if times is not None:
            self.model.add_usage_rows(times.tolist())

    def run(self, deadline: float, *, relative_gap: float = 0.0, hint: dict[int, int] | None = None) -> Exact:
        """Solve until proven, or until `deadline`: LPs first, then the ILP, each with the rows known to matter.

        The ILP starts from the choice `hint` where given.
        """
        best: dict[int, int] | None = None
        while (left := deadline - time.monotonic()) > 0:
            integers = self.model.picks if self.is_integer else 0
            answer = solve_linear(
                self.model.model(integers=integers),
                time_limit_s=left,
                seed=self.seed,
                relative_gap=relative_gap,
                hint=self.model.point(hint) if integers and hint is not None else None,
            )
            if answer.is_infeasible:
                return Exact(best, math.inf, self._tight_times(deadline))
            self.bound = max(self.bound, answer.bound + self.network.offset)
            if answer.values is None:
                break
            if not self.is_integer:
                self.is_integer = not self._add_broken(self.model.usage(answer.values), 1e-9)
                continue
            positions = self.model.positions(answer.values)
            if self._fits_after_all(positions):
                best = positions
                break
        return Exact(best, self.bound)

    def _fits_after_all(self, positions: dict[int, int]) -> bool:
        """If not, rows are added; a row that is broken within the solver's tolerance cuts the choice off exactly."""
        usage = self.network.usage_of(positions)
        if not (usage > self.network.capacity).any():
            return True
        if not self._add_broken(usage, 0.0):
            self.model.forbid_together(int((usage - self.network.capacity).argmax()), positions)
        return False

    def _add_broken(self, usage: Array, tolerance: float) -> bool:
        """Add rows for the time points over capacity; returns whether there were any without a row."""
        slack = tolerance * float(self.network.capacity.max(initial=0.0))
        broken = worst_times(usage - self.network.capacity - slack, frozenset(self.model.time_rows), self.batch)
        self.batch = min(100, self.batch * 2)
        self.model.add_usage_rows(broken.tolist())
        return bool(len(broken))

    def _tight_times(self, deadline: float) -> tuple[int, ...]:
        """A small set of rows that cannot hold together: halve while one half alone is infeasible."""
        rows = sorted(self.model.time_rows)
        while len(rows) > 1 and time.monotonic() < deadline:
            middle = len(rows) // 2
            half = next((part for part in (rows[:middle], rows[middle:]) if self._cannot_fit(part, deadline)), None)
            if half is None:
                break
            rows = half
        return tuple(rows)

    def _cannot_fit(self, times: list[int], deadline: float) -> bool:
        model = MarginalModel(self.network)
        model.add_usage_rows(times)
        integers = model.picks if self.is_integer else 0
        left = max(0.1, min(5.0, deadline - time.monotonic()))
        return solve_linear(model.model(integers=integers), time_limit_s=left, seed=self.seed).is_infeasible


def pair_count(network: Network) -> int:
    """How many allowed pairs the edges have: the size of the marginal model before classes merge."""
    return sum(matrix.size for node in network.nodes() for other, matrix in network.links[node].items() if node < other)


def priced_times(prices: Array) -> Array:
    """The time points of the highest prices: the rows that the ILP will need first."""
    priced = np.flatnonzero(prices > 0)
    return priced[np.argsort(-prices[priced], kind="stable")[:10]]
