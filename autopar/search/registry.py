"""Search strategies by name, and `solve`, which runs one and checks its answer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.errors import UnknownStrategyError
from autopar.search import simple
from autopar.search.anytime import Observer
from autopar.search.evaluation import evaluate
from autopar.search.ilp import solve_by_ilp
from autopar.search.problem import Problem
from autopar.search.solution import Solution

Strategy = Callable[..., Solution]
"""(Problem, time_limit_s, seed) -> Solution; it may also take `start`, `gap` and `observer` by keyword."""


class Registry:
    """Named strategies. One instance serves the public functions; tests make their own."""

    def __init__(self, strategies: dict[str, Strategy]) -> None:
        self._strategies = dict(strategies)

    def register(self, name: str) -> Callable[[Strategy], Strategy]:
        """Decorator: make a function available as `strategy=name`; a later one of the same name replaces it."""

        def add(strategy: Strategy) -> Strategy:
            self._strategies[name] = strategy
            return strategy

        return add

    def names(self) -> tuple[str, ...]:
        """The names in the order of registration."""
        return tuple(self._strategies)

    def get(self, name: str) -> Strategy:
        """The strategy of that name."""
        if name not in self._strategies:
            known = ", ".join(self._strategies)
            raise UnknownStrategyError(f"no search strategy is called {name!r}", fix=f"choose one of: {known}")
        return self._strategies[name]


_registry = Registry(
    {
        "ilp": solve_by_ilp,
        "dp": simple.solve_by_dp,
        "greedy": simple.solve_greedily,
        "local": simple.solve_locally,
        "anneal": simple.solve_by_annealing,
        "mcmc": simple.solve_by_mcmc,
        "beam": simple.solve_by_beam,
        "random": simple.solve_at_random,
    }
)
register = _registry.register
strategy_names = _registry.names


def solve(
    problem: Problem,
    *,
    strategy: str | Strategy = "ilp",
    time_limit_s: float = 60.0,
    seed: int = 0,
    start: Sequence[int] | None = None,
    gap: float = 0.0,
    observer: Observer | None = None,
) -> Solution:
    """Run a strategy and check its answer: the cost is what `evaluate` says, and never above that of `start`.

    A strategy that proves bounds may stop once the incumbent is within `gap`, relative to its cost.
    Deterministic for one seed as long as the time limit does not cut the search short. Raises
    `InfeasibleProblemError` where the strategy proves that nothing is feasible.
    """
    function = strategy if callable(strategy) else _registry.get(strategy)
    extras = {"start": start, "gap": gap, "observer": observer}
    accepted = inspect.signature(function).parameters
    solution = function(problem, time_limit_s, seed, **{key: extras[key] for key in extras if key in accepted})
    choice, cost = solution.choice, evaluate(problem, solution.choice)
    if start is not None and (start_cost := evaluate(problem, start)) < cost:
        choice, cost = tuple(start), start_cost
    name = solution.strategy or (strategy if isinstance(strategy, str) else getattr(strategy, "__name__", "strategy"))
    bound = min(solution.bound, cost) if not math.isnan(solution.bound) else -math.inf
    return replace(solution, choice=tuple(int(pick) for pick in choice), cost=cost, bound=bound, strategy=name)
