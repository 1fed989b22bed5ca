"""Add a search strategy in ten lines, and rank it against the built-in ones.

    python examples/research_search_strategy.py [PROBLEM.json ...]

Without arguments it makes a small problem of its own: a chain of operators, each sharded in one of three ways.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from autopar.search import Problem, Solution, evaluate, make_problem, register, solve
from autopar.search.laboratory import compare, to_table


@register("best-of-greedy")
def best_of_greedy(problem: Problem, time_limit_s: float, seed: int) -> Solution:
    """Change one random node of the greedy answer at a time, and keep what is cheaper and feasible."""
    random = np.random.default_rng(seed)
    best = solve(problem, strategy="greedy", time_limit_s=time_limit_s)
    for _ in range(500):
        choice = list(best.choice)
        node = int(random.integers(len(choice)))
        choice[node] = int(random.integers(len(problem.costs[node])))
        if (cost := evaluate(problem, choice)) < best.cost:
            best = Solution(tuple(choice), cost)
    return best


def chain(operators: int, seed: int) -> Problem:
    """Each operator computes for 1 to 3 ms; changing the sharding between two of them takes up to 2 ms."""
    random = np.random.default_rng(seed)
    return make_problem(
        costs=random.uniform(1e-3, 3e-3, (operators, 3)).tolist(),
        usages=random.integers(1, 4, (operators, 3)).tolist(),  # gigabytes
        intervals=[(node, node + 3) for node in range(operators)],
        edges=[(node, node + 1) for node in range(operators - 1)],
        edge_costs=(random.uniform(0, 2e-3, (operators - 1, 3, 3)) * (1 - np.eye(3))).tolist(),
        usage_limit=6,
        name="chain",
    )


def main(paths: Sequence[str] = ()) -> None:
    """Rank the new strategy on the given problems."""
    problems = [(Path(path).name, Problem.load(path)) for path in paths] or [("chain", chain(40, seed=0))]
    names = ("ilp", "dp", "greedy", "beam", "local", "best-of-greedy")
    records = compare(problems, [(name, name) for name in names], time_limit_s=2.0)
    Console().print(to_table(sorted(records, key=lambda record: (record.problem, record.cost))))


if __name__ == "__main__":
    main(sys.argv[1:])
