"""The `ilp` strategy: exact reductions, exact elimination where memory does not bind, else the marginal ILP."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.errors import InfeasibleProblemError
from autopar.search.anytime import Anytime, Observer
from autopar.search.build import Built, build_network, tight_interval
from autopar.search.elimination import Elimination
from autopar.search.marginal import MarginalModel
from autopar.search.mathopt import solve_linear
from autopar.search.network import Array, Network
from autopar.search.presolve import Deadend, Overfull, presolve
from autopar.search.problem import Problem
from autopar.search.solution import Solution

_ROWS_PER_ROUND = 100  # usage rows that enter together: spread over the horizon, more of them only slow the LP


def solve_by_ilp(
    problem: Problem,
    time_limit_s: float,
    seed: int,
    *,
    start: Sequence[int] | None = None,
    observer: Observer | None = None,
) -> Solution:
    """Reduce, then solve exactly; after the time limit, the best feasible choice seen and the bound proven by then.

    Raises `InfeasibleProblemError` where no choice is feasible.
    """
    run = Anytime(problem, "ilp", time_limit_s, observer)
    if start is not None:
        run.offer(start)
    built = build_network(problem)
    try:
        presolve(built.network, deadline=run.deadline)
        _search(run, built, seed)
    except Deadend:
        raise InfeasibleProblemError("no choice avoids every forbidden strategy and pair") from None
    except Overfull as full:
        raise tight_interval(problem, full.times) from None
    except KeyboardInterrupt:
        pass
    return run.solution()


def _search(run: Anytime, built: Built, seed: int) -> None:
    network = built.network
    if not network.nodes():
        run.offer(built.choice(network.recover({})))
        run.raise_bound(run.cost)
        return
    if _is_solved_without_capacities(run, built):
        return
    _solve_marginal(run, built, seed)


def lower_bound(network: Network, quanta: float) -> float:
    """A bound on the network as a bound on the problem: what rounding to quanta can hide comes off."""
    return network.to_cost(quanta - network.rounding)


def _is_solved_without_capacities(run: Anytime, built: Built) -> bool:
    """Whether the optimum without capacities is found and fits; otherwise its cost is still a bound."""
    network = built.network
    elimination = Elimination.plan(network)
    if elimination is None:
        return False
    value, positions = elimination.minimise()
    run.raise_bound(lower_bound(network, value))
    if (network.usage_of(positions) > network.capacity).any():
        return False
    run.offer(built.choice(network.recover(network.labelled(positions))))
    return True


def _solve_marginal(run: Anytime, built: Built, seed: int) -> None:
    """LP, then ILP, adding the usage rows that the answer breaks, until none is broken or the time is up."""
    network = built.network
    marginal = MarginalModel(network)
    integers = 0
    while run.left() > 0:
        answer = solve_linear(marginal.model(integers=integers), time_limit_s=run.left(), seed=seed)
        if answer.is_infeasible:
            raise Overfull(network.times[sorted(marginal.time_rows)] if marginal.time_rows else network.times)
        run.raise_bound(lower_bound(network, answer.bound + network.offset))
        if answer.values is None:
            return
        if integers:
            run.offer(built.choice(network.recover(network.labelled(marginal.positions(answer.values)))))
        broken = worst_times(marginal.usage(answer.values) - network.capacity, set(marginal.time_rows))
        if not len(broken) and integers:
            return
        marginal.add_usage_rows(broken.tolist())
        if not len(broken):
            integers = marginal.picks


def worst_times(excess: Array, present: set[int], count: int = _ROWS_PER_ROUND) -> Array:
    """Up to `count` time points over capacity and without a row: the worst of each stretch of the horizon."""
    over = np.flatnonzero(excess > 1e-9 * max(1.0, float(np.abs(excess).max(initial=0.0))))
    over = np.array([time for time in over.tolist() if time not in present], dtype=np.int64)
    if len(over) <= count:
        return over
    pieces = np.array_split(over, count)
    return np.array([piece[int(excess[piece].argmax())] for piece in pieces])
