"""Zero-bubble schedules found by list scheduling: which of forward, input gradient and weight gradient runs next.

Takes in the stage times and a memory limit in microbatches of activations; gives back action lists. The greedy rules
are those of Qi et al., arXiv:2401.10241, section 3.1; several variants run and the shortest wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from autopar.cost_models.pipeline import StageTimes
from autopar.schedules.actions import Action, Schedule

_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class ZeroBubbleMemory:
    """The memory limit of a rank in microbatches, and what stays of one between its two backward halves."""

    limit: float
    weight_share: float = 0.4  # Qi et al.: 32 of 34 + 5as/h after the input gradient


@dataclass(frozen=True, slots=True)
class _Variant:
    """How eager the greedy rules are."""

    fill_threshold: float  # a weight gradient fills a gap of at least this share of its length
    late_share: float  # a forward may delay the first backward by this share of its length


@dataclass(slots=True)
class _Rank:
    """What one rank has done so far."""

    now_s: float = 0.0
    forwards: int = 0
    inputs: int = 0
    weights: int = 0
    memory: float = 0.0
    turn: Literal["forward", "input"] = "forward"
    actions: list[Action] = field(default_factory=list)


def zero_bubble(
    ranks: int,
    microbatches: int,
    times: StageTimes | Sequence[StageTimes],
    memory: ZeroBubbleMemory | Sequence[ZeroBubbleMemory],
) -> Schedule:
    """The best schedule that the greedy variants find under the memory limit.

    `times` and `memory` are those of every rank, or of each.
    """
    every_time = [times] * ranks if isinstance(times, StageTimes) else list(times)
    every_memory = [memory] * ranks if isinstance(memory, ZeroBubbleMemory) else list(memory)
    # The shares are a grid, but for 0.75: it was added for one setting of the paper (8 ranks, 32 microbatches).
    found: list[tuple[float, int, Schedule]] = []
    for threshold, late in product((0.05, 0.5, 0.95), (0.0, 0.5, 0.75, 1.0)):
        greedy = _Greedy(microbatches, every_time, every_memory, _Variant(threshold, late))
        found.append((greedy.run(), len(found), greedy.schedule()))
    return min(found)[2]


class _Greedy:
    """One pass of list scheduling: always the rank that can act first, until every action is placed.

    Before its first backward a rank runs forwards; then it alternates forward and input gradient, and weight gradients
    fill gaps and free memory.
    """

    def __init__(
        self,
        microbatches: int,
        times: Sequence[StageTimes],
        memory: Sequence[ZeroBubbleMemory],
        variant: _Variant,
    ) -> None:
        ranks = len(times)
        self.count, self.microbatches, self.times = ranks, microbatches, times
        self.memory, self.variant = memory, variant
        self.ranks = [_Rank() for _ in range(ranks)]
        self.forward_at = [[0.0 if rank == 0 else _NEVER] * microbatches for rank in range(ranks)]
        self.input_at = [[_NEVER] * microbatches for _ in range(ranks)]

    def run(self) -> float:
        """Place every action; gives back the longest rank's seconds, from its first action to its last."""
        next_s = [self._next_time(index) for index in range(self.count)]
        while (now := min(next_s)) < _NEVER:
            index = next_s.index(now)
            self._step(index, now)
            for changed in range(max(0, index - 1), min(self.count, index + 2)):
                next_s[changed] = self._next_time(changed)
        if any(rank.weights < self.microbatches for rank in self.ranks):
            return _NEVER
        first = [min(self.forward_at[index]) for index in range(self.count)]
        return max(rank.now_s - first[index] for index, rank in enumerate(self.ranks))

    def schedule(self) -> Schedule:
        """The actions placed so far, by rank."""
        lists = tuple(tuple(rank.actions) for rank in self.ranks)
        return Schedule("zb-greedy", self.count, self.microbatches, 1, lists)

    def _next_time(self, index: int) -> float:
        """When this rank can act next: at the next arrival, or now if a weight gradient is at hand."""
        rank = self.ranks[index]
        arrival = min(self._forward_time(index), self._input_time(index))
        if rank.weights == self.microbatches:
            return _NEVER
        return rank.now_s if rank.weights < rank.inputs else max(rank.now_s, arrival)

    def _forward_time(self, index: int) -> float:
        rank = self.ranks[index]
        if rank.forwards == self.microbatches or rank.memory + 1 > self.memory[index].limit + 1e-9:
            return _NEVER
        return self.forward_at[index][rank.forwards]

    def _input_time(self, index: int) -> float:
        rank = self.ranks[index]
        return self.input_at[index][rank.inputs] if rank.inputs < rank.forwards else _NEVER

    def _step(self, index: int, now: float) -> None:
        rank = self.ranks[index]
        input_s, forward_s = self._input_time(index), self._forward_time(index)
        pending = rank.weights < rank.inputs
        if rank.inputs == 0:
            self._warm_up(index, now, input_s, forward_s)
        elif rank.turn == "forward" and rank.forwards < self.microbatches and forward_s == _NEVER and pending:
            self._weight(index)  # frees memory for the forward whose turn it is
        else:
            self._alternate(index, now, input_s, forward_s)

    def _warm_up(self, index: int, now: float, input_s: float, forward_s: float) -> None:
        late_s = now + self.times[index].forward_s - input_s
        if forward_s <= now and late_s <= self.variant.late_share * self.times[index].forward_s:
            self._forward(index, now)
        elif input_s <= now:
            self._input(index, now)
        else:
            self.ranks[index].now_s = min(item for item in (input_s, forward_s) if item > now)

    def _alternate(self, index: int, now: float, input_s: float, forward_s: float) -> None:
        rank = self.ranks[index]
        first, second = (forward_s, input_s) if rank.turn == "forward" else (input_s, forward_s)
        if min(first, second) > now:
            gap_s = min(first, second) - now
            fills = (
                rank.weights < rank.inputs
                and gap_s >= self.variant.fill_threshold * self.times[index].backward_weight_s
            )
            if fills:
                self._weight(index)
            else:
                rank.now_s = now + gap_s
        elif (first <= now) == (rank.turn == "forward"):
            self._forward(index, now)
        else:
            self._input(index, now)

    def _forward(self, index: int, now: float) -> None:
        rank, item = self.ranks[index], self.ranks[index].forwards
        rank.now_s = now + self.times[index].forward_s
        rank.forwards, rank.memory, rank.turn = item + 1, rank.memory + 1, "input"
        rank.actions.append(Action("forward", index, item))
        if index + 1 < self.count:
            self.forward_at[index + 1][item] = rank.now_s + self.times[index].send_s
        else:
            self.input_at[index][item] = rank.now_s

    def _input(self, index: int, now: float) -> None:
        rank, item = self.ranks[index], self.ranks[index].inputs
        rank.now_s = now + self.times[index].backward_input_s
        rank.inputs, rank.memory = item + 1, rank.memory - (1 - self.memory[index].weight_share)
        rank.turn = "forward"
        rank.actions.append(Action("backward_input", index, item))
        if index > 0:
            self.input_at[index - 1][item] = rank.now_s + self.times[index].send_s

    def _weight(self, index: int) -> None:
        rank, item = self.ranks[index], self.ranks[index].weights
        rank.now_s += self.times[index].backward_weight_s
        rank.weights, rank.memory = item + 1, rank.memory - self.memory[index].weight_share
        rank.actions.append(Action("backward_weight", index, item))
