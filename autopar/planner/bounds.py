"""A bound on every plan, whatever is recomputed and whichever gathered copies are kept; problems under other limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from autopar.planner.build import TIED, PlanningProblem
from autopar.planner.saved_values import late_decisions, roots_of
from autopar.search import Problem
from autopar.sharding.layout import replicated

Matrix = npt.NDArray[np.float64]


def with_copies_kept(planning: PlanningProblem) -> Problem:
    """The problem, without a limit, in which the backward reads whole parameters for nothing.

    No plan costs less than its optimum: recomputing takes time, and all that keeping a parameter's gathered copy saves
    is what the backward's move of the parameter, or of a view of it, to every rank in full costs.
    """
    decisions, problem = planning.decisions, planning.problem
    late, roots, whole = late_decisions(decisions), roots_of(decisions), replicated(len(planning.mesh_shape))
    costs = list(problem.edge_costs)
    known: dict[tuple[int, int, int], Matrix] = {}
    for edge, ((first, second), argument) in enumerate(zip(problem.edges, planning.edge_arguments, strict=True)):
        if argument == TIED or not late[second] or decisions[roots[first]].kind != "parameter":
            continue
        strategies = decisions[second].strategies
        key = id(costs[edge]), id(strategies), argument
        if key not in known:
            reads_whole = np.array([strategy.inputs[argument] == whole for strategy in strategies])
            known[key] = np.where(reads_whole[None, :], np.minimum(costs[edge], 0.0), costs[edge])
        costs[edge] = known[key]
    return replace(problem, edge_costs=tuple(costs), usage_limit=None)


def is_relaxed(relaxed: Problem, problem: Problem) -> bool:
    """Whether any move has become cheaper."""
    pairs = {(id(new), id(old)): (new, old) for new, old in zip(relaxed.edge_costs, problem.edge_costs, strict=True)}
    return any(new is not old and bool((new < old).any()) for new, old in pairs.values())


def with_limit(problem: Problem, limit: float | None) -> Problem:
    return replace(problem, usage_limit=limit)


def without_limit(problem: Problem) -> Problem:
    return with_limit(problem, None)
