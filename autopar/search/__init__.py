"""The search: numbers in, a choice with a proven bound out. It knows no model, no graph and no device."""

from __future__ import annotations

from autopar.search.evaluation import evaluate, violations
from autopar.search.experts.place import place_experts
from autopar.search.experts.placement import Placement
from autopar.search.frontier import memory_frontier, peak_usage, undominated
from autopar.search.problem import FORBIDDEN, Problem, make_problem
from autopar.search.registry import register, solve, strategy_names
from autopar.search.solution import Solution
from autopar.search.warm import solve_again

__all__ = [
    "FORBIDDEN",
    "Placement",
    "Problem",
    "Solution",
    "evaluate",
    "make_problem",
    "memory_frontier",
    "peak_usage",
    "place_experts",
    "register",
    "solve",
    "solve_again",
    "strategy_names",
    "undominated",
    "violations",
]
