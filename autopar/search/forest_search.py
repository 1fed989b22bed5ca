"""Search for good choices by forest moves under usage prices, cooled in cycles; feasible once, feasible ever after.

Every move proposes the best positions of a random forest under priced node costs, perturbed by noise that fades
(perturb and maximise: Papandreou and Yuille, ICCV 2011; cooled as in Kirkpatrick, Gelatt and Vecchi 1983). Clusters
of changes that do not fit the capacities are left out, the one that saves least per unit of usage first. Prices follow
what the proposals would use, so that the moves trade usage between nodes.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from autopar.search.forest import Forests, Proposal, State
from autopar.search.network import Array
from autopar.search.pricing import Pricing, ranges
from autopar.search.sweep import NODES_PER_BLOCK, Sweep
from autopar.search.tables import Tables

_STRETCHES = (1.0, 0.75, 0.5, 1.5)  # blocks of the sweeps, relative to the usual number
_WANTED = 0.9  # share of the nodes that a forest may take
_ADAPT = 0.02  # the most that one move changes a price, relative
_URGE = 1.05  # factor on the prices of time points that are over capacity
_DESCENT = 100  # moves from a fresh choice, without noise
_FIRST_CYCLE = 200  # moves of the first cooling; every next one takes twice as many


class ForestSearch:
    """One walk; `run` continues where the last call stopped. Deterministic by seed and number of moves."""

    def __init__(self, pricing: Pricing, tables: Tables, positions: Array, prices: Array, seed: int) -> None:
        self.pricing, self.tables = pricing, tables
        count = len(pricing.nodes)
        usual = max(1, count // NODES_PER_BLOCK)
        blocks = sorted({max(1, round(usual * stretch)) for stretch in _STRETCHES})
        self.forests = [Forests(pricing, tables, Sweep(tables, count, number)) for number in blocks]
        self.random = np.random.default_rng(seed)
        self.best: Array | None = None
        self.cost = math.inf  # quanta, of the best choice that fits
        self.bound = -math.inf  # quanta; how far away it is sets the noise
        self.moves = self.cycle_start = self.cycles = 0
        self.cycle_moves, self.next_cooling, self.heat = _DESCENT, _FIRST_CYCLE, 0.0
        self.prices = prices
        self.suggest(positions, prices)
        self.state = State(pricing, tables, positions)
        self._note()

    def suggest(self, positions: Array, prices: Array) -> None:
        """A choice, fitting or not, and prices to start the next descent from."""
        self.suggestion, self.fresh_prices = positions, prices

    def take(self, positions: Array, cost: float) -> None:
        """Take over a choice that fits, if it is better than the best one so far."""
        if cost < self.cost:
            self.best, self.cost = positions.copy(), cost
            self.state = State(self.pricing, self.tables, positions)

    def run(self, moves: int, deadline: float = math.inf) -> None:
        """Make so many moves, fewer where the deadline (`time.monotonic` seconds) passes."""
        for _ in range(moves):
            if time.monotonic() > deadline:
                return
            if self.moves - self.cycle_start >= self.cycle_moves:
                self._begin_cycle()
            self._move()

    def _begin_cycle(self) -> None:
        """Descents from fresh choices and coolings from the best one take turns."""
        self.cycle_start = self.moves
        self.cycles += 1
        self.prices = self.fresh_prices
        if self.best is None or self.cycles % 2 == 0:
            self.cycle_moves, self.heat, start = _DESCENT, 0.0, self.suggestion
        else:
            bound = self.bound if math.isfinite(self.bound) else self.pricing.offset
            self.heat = max(0.0, self.cost - bound) / len(self.pricing.nodes)
            self.cycle_moves, start = self.next_cooling, self.best
            self.next_cooling *= 2
        self.state = State(self.pricing, self.tables, start)

    def _move(self) -> None:
        left = 1.0 - (self.moves - self.cycle_start) / self.cycle_moves
        unary = self.pricing.priced(self.prices)
        if self.heat:
            unary = unary + left * self.heat * self.random.gumbel(size=len(unary))
        wanted = self.random.random(len(self.pricing.nodes)) < _WANTED
        proposal = self.forests[self.moves % len(self.forests)].propose(self.state, unary, wanted)
        self.moves += 1
        if len(proposal.places):
            taken = fitting(self.pricing, self.state, proposal)
            self._adapt(taken)
            self.state.move(proposal.places[taken.kept], proposal.positions[taken.kept], taken.usage)
            self._note()
        else:
            self._adapt(Taken(np.zeros(0, dtype=bool), self.state.usage, self.state.usage, []))

    def _adapt(self, taken: Taken) -> None:
        """Prices rise where proposals use more than there is, and fall where they use less."""
        capacity = self.pricing.capacity
        if not len(capacity):
            return
        greatest = float(capacity.max())
        rise = np.clip((taken.proposed - capacity) / greatest * 50.0 * _ADAPT, -_ADAPT, _ADAPT)
        prices = self.prices * np.exp(rise)
        over = taken.usage > capacity
        prices[over] *= _URGE
        blocked = over
        blocked[taken.blocked] = True
        count = int(blocked.sum())
        if count:
            worth = abs(self.state.cost()) + 1.0
            floor = 1e-3 * max(float(prices.max()), worth / (greatest * count))
            prices[blocked] = np.maximum(prices[blocked], floor)
        self.prices = prices

    def _note(self) -> None:
        if (self.state.usage > self.pricing.capacity).any():
            return
        cost = self.state.cost()
        if cost < self.cost and cost < self.pricing.offset + 0.5 * self.tables.forbidden:
            self.best, self.cost = self.state.positions.copy(), cost


@dataclass(frozen=True, slots=True)
class Taken:
    """Which changes of a proposal fit."""

    kept: Array  # mask over the proposal's places
    usage: Array  # profile with the kept changes
    proposed: Array  # profile with all changes
    blocked: list[int]  # time points for which changes were left out


def fitting(pricing: Pricing, state: State, proposal: Proposal) -> Taken:
    """Leave clusters out until no time point is over capacity that was not over before, nor further over."""
    places = proposal.places
    counts = pricing.place_rows[places + 1] - pricing.place_rows[places]
    rows = ranges(pricing.place_rows[places], counts)
    base, where = pricing.row_base[rows], np.repeat(np.arange(len(places)), counts)
    amounts = pricing.amounts[base + proposal.positions[where]] - pricing.amounts[base + state.positions[places][where]]
    first, last, cluster = pricing.first[rows], pricing.last[rows], proposal.cluster[where]
    limit = np.maximum(pricing.capacity, state.usage)
    proposed = usage = state.usage + pricing.profile(first, last, amounts)
    kept = np.ones(len(proposal.gain), dtype=bool)
    blocked: list[int] = []
    while len(usage) and float((excess := usage - limit).max()) > 0:
        worst = int(excess.argmax())
        blocked.append(worst)
        live = (first <= worst) & (worst < last) & kept[cluster]
        adds = np.bincount(cluster[live], amounts[live], len(kept))
        users = np.flatnonzero(adds > 0)
        rate = proposal.gain[users] / np.minimum(adds[users], excess[worst])
        users = users[np.argsort(rate, kind="stable")]
        dropped = users[: int(np.searchsorted(np.cumsum(adds[users]), excess[worst])) + 1]
        kept[dropped] = False
        gone = np.isin(cluster, dropped)
        usage = usage - pricing.profile(first[gone], last[gone], amounts[gone])
    if blocked:
        usage = state.usage + pricing.profile(*_kept_rows(kept[cluster], first, last, amounts))
    return Taken(kept[proposal.cluster], usage, proposed, blocked)


def _kept_rows(kept: Array, first: Array, last: Array, amounts: Array) -> tuple[Array, Array, Array]:
    return first[kept], last[kept], amounts[kept]
