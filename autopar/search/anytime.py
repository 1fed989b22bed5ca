"""The best choice so far, the best bound so far, and the clock: what makes a strategy anytime and interruptible."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from autopar.search.evaluation import evaluate
from autopar.search.problem import Problem
from autopar.search.solution import Solution

Observer = Callable[[float, float, float], None]
"""Called with (seconds, incumbent, bound) whenever one of the last two improves."""


class Anytime:
    """Collects incumbents and bounds. Only choices that `evaluate` accepts become incumbents."""

    def __init__(self, problem: Problem, strategy: str, time_limit_s: float, observer: Observer | None = None) -> None:
        self.problem, self.strategy, self.observer = problem, strategy, observer
        self.started = time.monotonic()
        self.deadline = self.started + time_limit_s
        self.choice: tuple[int, ...] | None = None
        self.cost = math.inf
        self.bound = -math.inf
        self.trace: list[tuple[float, float, float]] = []

    def seconds(self) -> float:
        """Since the strategy started."""
        return time.monotonic() - self.started

    def left(self) -> float:
        """Seconds until the time limit; negative after it."""
        return self.deadline - time.monotonic()

    def offer(self, choice: Sequence[int]) -> bool:
        """Take the choice if it is feasible and better; returns whether it was taken."""
        cost = evaluate(self.problem, choice)
        if not cost < self.cost:
            return False
        self.choice, self.cost = tuple(choice), cost
        self._log()
        return True

    def raise_bound(self, bound: float) -> None:
        """Note a proven lower bound on the cost of every feasible choice."""
        if bound > self.bound:
            self.bound = min(bound, self.cost)
            self._log()

    def is_proven(self, relative_gap: float = 0.0) -> bool:
        """Whether the incumbent is within `relative_gap` of the bound."""
        return self.cost - self.bound <= relative_gap * abs(self.cost) if math.isfinite(self.cost) else False

    def solution(self, fallback: Sequence[int] | None = None) -> Solution:
        """The answer so far; `fallback` stands in where no feasible choice was seen."""
        choice = self.choice
        if choice is None:
            choice = tuple(fallback) if fallback is not None else (0,) * len(self.problem.costs)
        bound = min(self.bound, self.cost)
        return Solution(choice, self.cost, bound, self.strategy, self.seconds(), tuple(self.trace))

    def _log(self) -> None:
        entry = (self.seconds(), self.cost, self.bound)
        self.trace.append(entry)
        if self.observer is not None:
            self.observer(*entry)
