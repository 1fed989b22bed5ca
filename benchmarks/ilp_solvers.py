"""OR-Tools' solvers on what the reductions leave of contest instances, one thread each.

    python -m benchmarks.ilp_solvers DIR [--instances A,B,G] [--time-limit 60] [--write-docs]

Each solver gets the same marginal model with the same usage rows: those that the LP broke, and then those that HiGHS's
integer answers broke until one kept every row. PDLP solves linear programs only: it gets the LP, and so does HiGHS once
more.
"""

from __future__ import annotations

import argparse
import datetime as dt
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ortools.math_opt.python import mathopt

from autopar.search import Problem
from autopar.search.build import build_network
from autopar.search.exact import MarginalSearch
from autopar.search.mathopt import LinearModel, cost_unit, to_proto
from autopar.search.presolve import presolve
from autopar.search.progress import number
from benchmarks.iopddl import DOCS, instance_path
from benchmarks.tables import line, stamp, write_table

HEADER = ("| | solver | status | cost | bound | s |", "| --- | --- | --- | ---: | ---: | ---: |")
SOLVERS = {
    "HiGHS": mathopt.SolverType.HIGHS,
    "SCIP": mathopt.SolverType.GSCIP,
    "CP-SAT": mathopt.SolverType.CP_SAT,
}
LP_SOLVERS = {"HiGHS, LP": mathopt.SolverType.HIGHS, "PDLP, LP": mathopt.SolverType.PDLP}


@dataclass(frozen=True, slots=True)
class Case:
    """The model of one instance, and what its objective leaves out."""

    name: str
    integer: LinearModel
    linear: LinearModel
    offset: float


def make_case(path: Path, name: str, seconds: float) -> Case:
    """Reduce an instance and find its usage rows."""
    network = build_network(Problem.load(path)).network
    presolve(network)
    search = MarginalSearch(network, seed=0)
    search.run(time.monotonic() + seconds)
    model = search.model
    return Case(name, model.model(), model.model(integers=0), network.offset)


def measure(case: Case, solver: str, kind: mathopt.SolverType, model: LinearModel, seconds: float) -> str:
    """One row of the table."""
    unit = cost_unit(model.costs)
    params = mathopt.SolveParameters(time_limit=dt.timedelta(seconds=seconds), relative_gap_tolerance=0.0)
    if kind != mathopt.SolverType.HIGHS:
        params.threads = 1
    params.highs.string_options["parallel"] = "off"
    math_opt_model = mathopt.Model.from_model_proto(to_proto(model, unit))
    started = time.perf_counter()
    result = mathopt.solve(math_opt_model, kind, params=params)
    spent = time.perf_counter() - started
    bounds = result.termination.objective_bounds
    cost, bound = (value * unit + case.offset for value in (bounds.primal_bound, bounds.dual_bound))
    status = result.termination.reason.name.lower().replace("_", " ")
    shown = (number(round(value) + 0.0 if math.isfinite(value) else value) for value in (cost, bound))
    return line((case.name, solver, status, *shown, f"{spent:.1f}"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every solver on every instance."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the instances lie")
    parser.add_argument("--instances", default="A,B,G", help="letters with commas between them")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS", help="for each solver")
    parser.add_argument("--write-docs", action="store_true", help="render the table into docs/search.md")
    args = parser.parse_args(arguments)
    rows = []
    for name in args.instances.split(","):
        case = make_case(instance_path(args.folder, name), name, 2 * args.time_limit)
        runs = [(solver, kind, case.integer) for solver, kind in SOLVERS.items()]
        runs += [(solver, kind, case.linear) for solver, kind in LP_SOLVERS.items()]
        for solver, kind, model in runs:
            rows.append(measure(case, solver, kind, model, args.time_limit))
            print(rows[-1], flush=True)
    if args.write_docs:
        measured = f"At most {args.time_limit:g} s each. {', '.join(stamp().values())}."
        write_table(DOCS, "ilp solvers", [*HEADER, *rows, "", measured])
    return 0


if __name__ == "__main__":
    sys.exit(main())
