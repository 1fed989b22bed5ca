"""In which dtype gradients are summed over the ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from autopar.planner.build import TIED, PlanningProblem
from autopar.planner.decisions import Decision
from autopar.search import FORBIDDEN
from autopar.sharding.layout import is_partial

Matrix = npt.NDArray[np.float64]


def is_cast(decision: Decision) -> bool:
    """Whether it is an op that changes the dtype of its input alone."""
    return decision.call is not None and decision.call.name == "aten._to_copy.default"


def reduced_after_casts(planning: PlanningProblem) -> PlanningProblem:
    """Only plans that cast the ranks' addends of a parameter's gradient, and then sum them in its dtype.

    Where the gradient does not come from a cast there is nothing to restrict.
    """
    decisions = planning.decisions
    casts = {item.sources[0].decision for item in decisions if item.kind == "gradient"}
    costs = list(planning.problem.edge_costs)
    known: dict[tuple[int, int, int], Matrix] = {}
    for edge, ((first, second), argument) in enumerate(
        zip(planning.problem.edges, planning.edge_arguments, strict=True)
    ):
        if argument != TIED and second in casts and is_cast(decisions[second]):
            output = decisions[second].sources[argument].output
            key = id(costs[edge]), id(decisions[first].strategies), id(decisions[second].strategies)
            if key not in known:
                known[key] = _without_sums(decisions[first], output, decisions[second], costs[edge])
            costs[edge] = known[key]
    return replace(planning, problem=replace(planning.problem, edge_costs=tuple(costs)))


def _without_sums(producer: Decision, output: int, cast: Decision, costs: Matrix) -> Matrix:
    """The cost matrix of an edge, without the moves that sum."""
    made = [strategy.outputs[output] for strategy in producer.strategies]
    read = [strategy.inputs[0] for strategy in cast.strategies]
    sums = [
        [any(is_partial(left) and not is_partial(right) for left, right in zip(*pair, strict=True)) for pair in row]
        for row in ([(source, target) for target in read] for source in made)
    ]
    return np.where(np.array(sums, dtype=bool), float(FORBIDDEN), costs)
