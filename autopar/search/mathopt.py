"""One call into OR-Tools MathOpt: arrays in, arrays out."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from autopar.search.network import Array

_COST_BITS = 30


@dataclass(frozen=True, slots=True)
class LinearModel:
    """minimise costs @ x, x >= 0 (and <= upper), lower_bounds <= A @ x <= upper_bounds, A by triplets sorted by row."""

    costs: Array
    upper: Array
    is_integer: Array
    rows: Array
    columns: Array
    values: Array
    row_lower: Array
    row_upper: Array


@dataclass(frozen=True, slots=True)
class Answer:
    """What the solver found within its time."""

    values: Array | None  # the best point found
    cost: float  # its objective; inf without a point
    bound: float  # proven lower bound; inf when the model is infeasible

    @property
    def is_infeasible(self) -> bool:
        """Proven: no point satisfies the rows."""
        return self.bound == math.inf


def solve_linear(
    model: LinearModel, *, time_limit_s: float, seed: int = 0, relative_gap: float = 0.0, hint: Array | None = None
) -> Answer:
    """Run HiGHS on one thread (SCIP where HiGHS fails), from the point `hint` if given."""
    unit = cost_unit(model.costs)
    opt_model = mathopt.Model.from_model_proto(to_proto(model, unit))
    params = _parameters(time_limit_s, seed, relative_gap)
    hints = mathopt.ModelSolveParameters()
    if hint is not None:
        by_variable = dict(zip(opt_model.variables(), hint.tolist(), strict=True))
        hints.solution_hints.append(mathopt.SolutionHint(variable_values=by_variable))
    result = _run(opt_model, mathopt.SolverType.HIGHS, params, hints)
    if result is None:
        result = _run(opt_model, mathopt.SolverType.GSCIP, params, hints)
    if result is None:
        return Answer(None, math.inf, -math.inf)
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return Answer(None, math.inf, math.inf)
    bound = result.termination.objective_bounds.dual_bound * unit
    if not result.has_primal_feasible_solution():
        return Answer(None, math.inf, bound)
    values = np.array(list(result.variable_values().values()))
    return Answer(values, float(model.costs @ values), bound)


def cost_unit(costs: Array) -> float:
    """A power of two that brings costs into the range that the solvers' absolute tolerances are made for."""
    greatest = float(np.abs(costs).max(initial=0.0))
    return 2.0 ** max(0, math.ceil(math.log2(greatest)) - _COST_BITS) if greatest > 0 else 1.0


def _parameters(time_limit_s: float, seed: int, relative_gap: float) -> mathopt.SolveParameters:
    params = mathopt.SolveParameters(
        time_limit=dt.timedelta(seconds=max(0.01, time_limit_s)), relative_gap_tolerance=relative_gap
    )
    params.highs.string_options["parallel"] = "off"
    params.highs.int_options["random_seed"] = seed % 2**31
    params.highs.double_options["mip_abs_gap"] = 0.0
    return params


def _run(
    opt_model: mathopt.Model,
    solver: mathopt.SolverType,
    params: mathopt.SolveParameters,
    hints: mathopt.ModelSolveParameters,
) -> mathopt.SolveResult | None:
    """None where the solver gives up with an error (HiGHS: model status unknown)."""
    try:
        return mathopt.solve(opt_model, solver, params=params, model_params=hints)
    except (RuntimeError, ValueError, AttributeError):  # AttributeError: how OR-Tools 9.15 reports an internal status
        return None


def to_proto(model: LinearModel, unit: float) -> model_pb2.ModelProto:
    """The model as MathOpt takes it, with costs in `unit`s."""
    proto = model_pb2.ModelProto()
    columns, rows = len(model.costs), len(model.row_lower)
    variables = proto.variables
    variables.ids.extend(range(columns))
    variables.lower_bounds.extend([0.0] * columns)
    variables.upper_bounds.extend(model.upper.tolist())
    variables.integers.extend(model.is_integer.tolist())
    priced = np.flatnonzero(model.costs)
    proto.objective.linear_coefficients.ids.extend(priced.tolist())
    proto.objective.linear_coefficients.values.extend((model.costs[priced] / unit).tolist())
    proto.linear_constraints.ids.extend(range(rows))
    proto.linear_constraints.lower_bounds.extend(model.row_lower.tolist())
    proto.linear_constraints.upper_bounds.extend(model.row_upper.tolist())
    order = np.lexsort((model.columns, model.rows))
    matrix = proto.linear_constraint_matrix
    matrix.row_ids.extend(model.rows[order].tolist())
    matrix.column_ids.extend(model.columns[order].tolist())
    matrix.coefficients.extend(model.values[order].tolist())
    return proto
