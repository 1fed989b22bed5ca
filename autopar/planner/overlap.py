"""How much of each move can hide behind computation, known before anything is chosen.

The rules are those of `passes.schedule_collectives`: a collective starts as soon as its input is there, an all_gather
at most one heavy op before its reader; a result of the program is waited for at the end of its phase, or one heavy op
after it was issued if it keeps its input alive. What there is to hide behind is taken at each op's fastest strategy;
gathers that wait for one op share it, and so do the sums of gradients. Where a rank computes at the rate `overlap`
while it communicates, a collective of c seconds saves overlap * c of them, if there is so much to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from torch.distributed.tensor import Partial

from autopar.passes.schedule_collectives import HEAVY_NAMES
from autopar.planner.decisions import Decision
from autopar.planner.prices import Prices
from autopar.planner.saved_values import roots_of
from autopar.search import FORBIDDEN
from autopar.sharding.layout import REPLICATE, Layout, is_partial, replicated
from autopar.sharding.op_call import TensorSpec
from autopar.sharding.reshard import KINDS, End, end_steps, reshard_seconds_matrix, reshard_steps

Matrix = npt.NDArray[np.float64]
RESULTS = ("gradient", "result")
GATHER, ALL_REDUCE = KINDS.index("all_gather"), KINDS.index("all_reduce")


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds of computation that a move into one reader may run beside.

    `gather_s` for an all_gather, `other_s` for every other collective; `at_end` says which step of a move of several is
    free to: the last of a result's, the first of an op's input's.
    """

    gather_s: float = 0.0
    other_s: float = 0.0
    all_reduce_s: float = 0.0
    at_end: bool = False


NOTHING = Window()


def _window(gather_s: float, other_s: float, all_reduce_s: float, *, at_end: bool = False) -> Window:
    """A window in whole nanoseconds, so that those of repeated layers are equal."""
    if max(gather_s, other_s, all_reduce_s) < 0.5e-9:
        return NOTHING
    return Window(round(gather_s, 9), round(other_s, 9), round(all_reduce_s, 9), at_end)


@dataclass
class MoveCosts:
    """Seconds of moves from `sources` (rows) to `targets` (columns), less what a window hides; FORBIDDEN if none."""

    spec: TensorSpec
    sources: tuple[Layout, ...]
    targets: tuple[Layout, ...]
    prices: Prices
    _under: dict[Window, Matrix] = field(default_factory=dict)
    _of_gradients: dict[Window, Matrix] = field(default_factory=dict)

    def under(self, window: Window) -> Matrix:
        """The matrix for one window; one and the same for windows that are equal."""
        if window not in self._under:
            seconds = self.seconds if window == NOTHING else self.seconds - self._saved(window)
            self._under[window] = np.where(np.isfinite(seconds), seconds, float(FORBIDDEN))
        return self._under[window]

    @cached_property
    def seconds(self) -> Matrix:
        """Nothing hidden; inf where there is no path."""
        mesh_shape = self.prices.mesh.shape
        return reshard_seconds_matrix(self.spec, self.sources, self.targets, mesh_shape, self.prices.collective)

    def of_gradient(self, window: Window) -> Matrix:
        """As `under`, for a parameter's gradient: its sum over ranks is made once a step, behind all microbatches."""
        if self.prices.microbatches == 1:
            return self.under(window)
        if window not in self._of_gradients:
            once_s = self.seconds / self.prices.microbatches
            self._of_gradients[window] = np.where(self._are_sums, once_s, self.under(window))
        return self._of_gradients[window]

    @cached_property
    def _are_sums(self) -> npt.NDArray[np.bool_]:
        """Which moves do nothing but sum: those are deferred (`passes.defer_reductions`)."""
        pairs = [[list(zip(source, target, strict=True)) for target in self.targets] for source in self.sources]
        found = [
            [all(have == want or (is_partial(have) and want == REPLICATE) for have, want in pair) for pair in row]
            for row in pairs
        ]
        return np.array(found, dtype=bool) & np.isfinite(self.seconds)

    def _saved(self, window: Window) -> Matrix:
        kinds, seconds = self._last_steps if window.at_end else self._first_steps
        limits = np.full(len(KINDS) + 1, window.other_s)
        limits[[GATHER, ALL_REDUCE, KINDS.index("slice"), -1]] = window.gather_s, window.all_reduce_s, 0.0, 0.0
        profile = self.prices.mesh.profile
        limits = np.maximum(0.0, limits - profile.overlap_after_s)
        saved: Matrix = np.minimum(profile.overlap * seconds, limits[kinds])
        return saved

    @cached_property
    def _first_steps(self) -> tuple[npt.NDArray[np.intp], Matrix]:
        return self._steps("first")

    @cached_property
    def _last_steps(self) -> tuple[npt.NDArray[np.intp], Matrix]:
        return self._steps("last")

    def _steps(self, end: End) -> tuple[npt.NDArray[np.intp], Matrix]:
        ends = self.sources, self.targets, self.prices.mesh.shape, self.prices.collective
        return end_steps(self.spec, *ends, end=end)


class Windows:
    """The window of every edge into a decision."""

    def __init__(self, decisions: Sequence[Decision], prices: Prices) -> None:
        self.decisions, self.prices = decisions, prices
        fastest = [0.0 if item.kind != "op" else float(item.seconds.min()) for item in decisions]
        self.clock = [0.0, *accumulate(fastest)]  # when each decision starts, if nothing communicates
        self.heavy_before = self._heavy_before()
        self.phase_start = self._phase_start()
        self.roots = roots_of(decisions)
        self.gathered = self._gathered_bytes()
        self.results = self._result_windows()

    def of(self, consumer: int, argument: int) -> Window:
        """The window of a move into tensor input `argument` of a decision."""
        if self.prices.mesh.profile.overlap == 0:
            return NOTHING
        decision = self.decisions[consumer]
        if decision.kind in RESULTS:
            return self.results.get(consumer, NOTHING)
        source = decision.sources[argument].decision
        start = max(self.clock[source + 1], self.phase_start[decision.phase])
        between_s = max(0.0, self.clock[consumer] - start)
        gather_s = min(between_s, self._gather_share(consumer, source) * self._heavy_s(consumer))
        return _window(gather_s, between_s, between_s)

    def _heavy_before(self) -> list[int]:
        """Per decision, the heavy op before it in its phase; -1 for none."""
        last: dict[str, int] = {}
        found = []
        for index, decision in enumerate(self.decisions):
            found.append(last.get(decision.phase, -1))
            if decision.call is not None and decision.call.name.split(".")[1] in HEAVY_NAMES:
                last[decision.phase] = index
        return found

    def _phase_start(self) -> dict[str, float]:
        starts: dict[str, float] = {}
        for index, decision in enumerate(self.decisions):
            if decision.kind == "op":
                starts.setdefault(decision.phase, self.clock[index])
        return starts

    def _heavy_s(self, consumer: int) -> float:
        heavy = self.heavy_before[consumer]
        return 0.0 if heavy < 0 else self.clock[heavy + 1] - self.clock[heavy]

    def _gathered_bytes(self) -> dict[tuple[int, bool], float]:
        """By heavy op: bytes of the parameters, and of the other tensors, whose readers follow it next."""
        total: dict[tuple[int, bool], float] = {}
        for index, decision in enumerate(self.decisions):
            for source in decision.sources if decision.kind == "op" else ():
                key = self._gather_key(index, source.decision)
                total[key] = total.get(key, 0.0) + self._bytes(source.decision)
        return total

    def _gather_key(self, consumer: int, source: int) -> tuple[int, bool]:
        return self.heavy_before[consumer], self.decisions[self.roots[source]].kind == "parameter"

    def _gather_share(self, consumer: int, source: int) -> float:
        total = self.gathered[self._gather_key(consumer, source)]
        return self._bytes(source) / total if total else 0.0

    def _bytes(self, index: int) -> float:
        return float(sum(spec.nbytes for spec in self.decisions[index].specs if spec is not None))

    def _result_windows(self) -> dict[int, Window]:
        """Results in the order in which they are made; their sums queue for the links, as if all were replicated."""
        results = [(self.decisions[index].sources[0].decision, index) for index in range(len(self.decisions))
                   if self.decisions[index].kind in RESULTS]  # fmt: skip
        windows: dict[int, Window] = {}
        free_at, end = {"forward": 0.0, "backward": 0.0}, self._phase_ends()
        for producer, index in sorted(results):
            spec, phase = self.decisions[index].specs[0], self.decisions[producer].phase
            assert spec is not None
            seconds = self._sum_seconds(spec)
            start = max(free_at[phase], self.clock[producer + 1])
            free_at[phase] = start + seconds
            window_s = min(seconds, max(0.0, end[phase] - start))
            bounded_s = min(window_s, self._heavy_after(producer))
            windows[index] = _window(bounded_s, bounded_s, window_s, at_end=True)
        return windows

    def _phase_ends(self) -> dict[str, float]:
        ends = {"forward": 0.0, "backward": 0.0}
        for index, decision in enumerate(self.decisions):
            if decision.kind == "op":
                ends[decision.phase] = self.clock[index + 1]
        return ends

    def _heavy_after(self, producer: int) -> float:
        """Seconds of the next heavy op in the producer's phase."""
        for index in range(producer + 1, len(self.decisions)):
            heavy = self.heavy_before[index]
            if heavy > producer and self.decisions[heavy].phase == self.decisions[producer].phase:
                return self.clock[heavy + 1] - self.clock[heavy]
        return 0.0

    def _sum_seconds(self, spec: TensorSpec) -> float:
        """To sum a tensor over the whole mesh."""
        axes = len(self.prices.mesh.shape)
        steps = reshard_steps(
            spec, (Partial(),) * axes, replicated(axes), self.prices.mesh.shape, self.prices.collective
        )
        return sum(step.seconds for step in steps)
