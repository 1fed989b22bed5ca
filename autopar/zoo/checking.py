"""One model under many meshes and plans: captured once, and run on one device once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import nn

from autopar.api import SEED
from autopar.arguments import call_arguments, make_options
from autopar.capture.program import Program
from autopar.capture.trace import capture, tensor_leaves
from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.model_source import parse_mesh_shape
from autopar.planner.make import plan_program
from autopar.runtime.virtual_run import run_virtual_step
from autopar.sharding.assignment import Assignment
from autopar.verification import Report, Values, compare, eager_values, is_random, traced_values
from autopar.zoo.models import TABLE, make
from autopar.zoo.more import MORE, make_more
from autopar.zoo.plain import PLAIN, make_plain

T = TypeVar("T")
Make = Callable[[str], tuple[nn.Module, Any]]
FAMILIES: Mapping[str, tuple[Mapping[str, Any], Make]] = {
    "zoo": (TABLE, make),
    "more": (MORE, make_more),
    "plain": (PLAIN, make_plain),
}


class Verdict(NamedTuple):
    """How a cell ended."""

    verdict: str  # verified, refused or wrong
    detail: str  # the worst relative error and its tensor, or why it was refused


@dataclass(frozen=True, slots=True)
class Outcome:
    """One cell of the table."""

    architecture: str
    mesh: str
    plan: str
    verdict: str  # verified, refused or wrong
    detail: str  # the worst relative error and its tensor, or why it was refused


def names_of(family: str) -> list[str]:
    """The models of a family."""
    return list(FAMILIES[family][0])


def make_model(name: str) -> tuple[nn.Module, Any]:
    """(model in training mode, example inputs). Raises ModelSourceError for a name that no family has."""
    for models, maker in FAMILIES.values():
        if name in models:
            return maker(name)
    return make(name)  # raises, with the names of the zoo


@dataclass
class Specimen:
    """A model, its program and what one device computes."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    program: Program
    expected: Values
    reference: str

    def verify(self, assignment: Assignment, mesh: Mesh) -> Report:
        """One plan on all ranks of its mesh."""
        run = run_virtual_step(self.model, self.program, assignment, mesh.shape, self.args, self.kwargs, seed=SEED)
        return compare(Values(run.outputs, run.gradients, run.buffers), self.expected, reference=self.reference)


def specimen(name: str) -> Specimen:
    """Make, capture and run a model. Raises an AutoparError if it cannot be captured."""
    model, inputs = make_model(name)
    args, kwargs = call_arguments(inputs)
    program = capture(model, args, kwargs)
    if is_random(program):
        expected = traced_values(model, program, tensor_leaves(args, kwargs), SEED)
        return Specimen(name, model, args, kwargs, program, expected, "the captured program on one device")
    expected = eager_values(model, program, args, kwargs)
    return Specimen(name, model, args, kwargs, program, expected, "the model as PyTorch runs it")


Cells = Mapping[str, Mapping[str, Sequence[str]]]  # by model, by mesh: plans


def check_virtually(cells: Cells, *, hardware: str) -> Iterator[Outcome]:
    """The outcome of every cell, all ranks in this process."""
    for name, meshes in cells.items():
        yield from _check(name, meshes, hardware)


def _check(name: str, meshes: Mapping[str, Sequence[str]], hardware: str) -> Iterator[Outcome]:
    found = attempted(lambda: specimen(name))
    for mesh, plans in meshes.items():
        if isinstance(found, Verdict):
            yield from (Outcome(name, mesh, plan, *found) for plan in plans)
            continue
        bench = _Bench(found, Mesh(parse_mesh_shape(mesh), hardware=hardware))
        for plan in plans:
            yield Outcome(name, mesh, plan, *attempted(partial(bench.verdict, plan)))


@dataclass
class _Bench:
    """A specimen on one mesh; plans that decide the same are run once."""

    found: Specimen
    mesh: Mesh
    known: dict[object, Verdict] = field(default_factory=dict)  # by what a plan decides

    def verdict(self, plan: str) -> Verdict:
        """Verified or wrong. Raises what planning and running raise."""
        planned = plan_program(self.found.program, self.mesh, make_options(plan, None, None, ()))
        assignment = planned.assignment
        decided = planned.choice, frozenset(assignment.recomputed), frozenset(assignment.gathered_once)
        if decided not in self.known:
            self.known[decided] = judged(self.found.verify(assignment, self.mesh))
        return self.known[decided]


def judged(report: Report) -> Verdict:
    """The verdict of what was compared."""
    detail = f"{report.worst_relative_error:.1e} {report.worst_tensor}"
    return Verdict("verified" if report.ok else "wrong", detail)


def attempted(stage: Callable[[], T]) -> T | Verdict:
    """What a stage returns; where it raises, the verdict of its cells."""
    try:
        return stage()
    except Exception as error:  # nothing is hidden: whatever is raised is what the cell shows
        return _refusal(error)


def _refusal(error: Exception) -> Verdict:
    """An error that is not of our own classes is a fault of ours."""
    if not isinstance(error, AutoparError):
        return Verdict("wrong", f"{type(error).__name__}: {error}")
    where = f", at {error.where}" if error.where else ""
    return Verdict("refused", f"{type(error).__name__}: {error.what}{where}")
