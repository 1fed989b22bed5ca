"""A plan of a choice that was made elsewhere: a saved or an edited plan, priced anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.capture.program import Program
from autopar.mesh import Mesh
from autopar.planner.build import PlanningProblem
from autopar.planner.hosting import Hosting
from autopar.planner.make import Options, Planned, Planner
from autopar.planner.residency import Residency


def price_choice(
    program: Program,
    mesh: Mesh,
    options: Options,
    pick: Callable[[PlanningProblem, Hosting], tuple[Sequence[int], Residency]],
    name: str,
) -> Planned:
    """The plan of a choice made elsewhere (a saved or edited plan), priced anew; its memory is not limited.

    `pick`: a choice, and what becomes of its values.
    """
    planner = Planner(program, mesh, replace(options, parameter_layouts=None, hosted=None))
    picked, residency = pick(planner.planning, planner.hosting)
    best = planner.add(name, tuple(picked), planner.checked(name, tuple(picked)))
    best = planner.with_residency(best, residency)
    return planner.planned(best)
