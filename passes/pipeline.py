"""From a program and its assignment to the graphs of one rank: the ordered passes, and one loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.capture.program import InputKind, Program
from autopar.collector import collector_paused
from autopar.fake_calls import FakeCalls
from autopar.passes.check_graph import (
    check_hosted,
    check_moves_agree,
    check_packed,
    check_recomputed,
    check_values,
    check_waits,
)
from autopar.passes.host_parameters import host_parameters
from autopar.passes.insert_moves import insert_moves
from autopar.passes.local_call import RankGeometry
from autopar.passes.localize import fake_mode_of, localize
from autopar.passes.observed import ExpertCount, counts_of
from autopar.passes.pack_saved import pack_saved
from autopar.passes.recompute import recompute
from autopar.passes.schedule_collectives import schedule_collectives
from autopar.passes.split_phases import split_phases
from autopar.sharding.assignment import Assignment

Observer = Callable[[str, fx.GraphModule], None]
"""Told the name of each pass and the graph that it made."""


@dataclass(frozen=True)
class Emission:
    """All that a pass may read beside the graph."""

    program: Program
    assignment: Assignment
    geometry: RankGeometry
    fake_calls: FakeCalls


@dataclass(frozen=True)
class Pass:
    """A rewrite, and the check of what it promises."""

    name: str
    run: Callable[[fx.GraphModule, Emission], fx.GraphModule]
    check: Callable[[fx.GraphModule, Emission], None]


SHARED_PASSES: tuple[Pass, ...] = (
    Pass("recompute", lambda gm, job: recompute(gm, job.program, job.assignment.recomputed), check_recomputed),
    Pass("insert_moves", lambda gm, job: insert_moves(gm, job.assignment), check_moves_agree),
)
"""What they make is the same for every rank."""
RANK_PASSES: tuple[Pass, ...] = (
    Pass("localize", lambda gm, job: localize(gm, job.assignment, job.geometry, job.fake_calls), check_values),
    Pass("schedule_collectives", lambda gm, _: schedule_collectives(gm), check_waits),
    Pass(
        "host_parameters",
        lambda gm, job: host_parameters(gm, job.program, job.assignment, job.geometry, job.fake_calls),
        check_hosted,
    ),
    Pass(
        "pack_saved",
        lambda gm, job: pack_saved(gm, job.program, job.assignment.packed, job.geometry, job.fake_calls),
        check_packed,
    ),
)
PASSES = (*SHARED_PASSES, *RANK_PASSES)


@dataclass(frozen=True)
class LocalProgram:
    """One rank's graphs, in local shapes. `forward` and `backward` are boxed; see `split_phases` for what they take."""

    program: Program
    geometry: RankGeometry
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    joint: fx.GraphModule  # the same nodes before the split; not to be called

    @property
    def expert_counts(self) -> tuple[ExpertCount, ...]:
        """What the counts that the forward returns between its results and the saved tensors are of."""
        return counts_of(self.forward.graph)

    @property
    def saved(self) -> tuple[str, ...]:
        """Names of the tensors that the forward returns for the backward, in order."""
        if self.backward is None:
            return ()
        tangents = {item.node for item in self.program.inputs if item.kind is InputKind.TANGENT}
        names = (node.name for node in self.backward.graph.nodes if node.op == "placeholder")
        return tuple(name for name in names if name not in tangents)


def emit(
    program: Program, assignment: Assignment, geometry: RankGeometry, observer: Observer | None = None
) -> LocalProgram:
    """Run all passes: the program of the rank of `geometry`."""
    return emit_ranks(program, assignment, [geometry], observer)[0]


@collector_paused()
def emit_ranks(
    program: Program,
    assignment: Assignment,
    geometries: Sequence[RankGeometry],
    observer: Observer | None = None,
    *,
    fake_calls: FakeCalls | None = None,
) -> list[LocalProgram]:
    """The programs of several ranks, as `emit` makes each of them; what ranks have in common is worked out once.

    `fake_calls`: of the mode of the program's fake values; given again, it knows what other emissions have called.
    """
    fake_calls = fake_calls or FakeCalls(fake_mode_of(program.graph_module))
    jobs = [Emission(program, assignment, geometry, fake_calls) for geometry in geometries]
    shared = _run(SHARED_PASSES, program.graph_module, jobs[0], observer)
    locals_ = []
    for job in jobs:
        gm = _run(RANK_PASSES, shared, job, observer)
        forward, backward = split_phases(gm, program)
        locals_.append(LocalProgram(program, job.geometry, forward, backward, gm))
    return locals_


def _run(passes: Sequence[Pass], gm: fx.GraphModule, job: Emission, observer: Observer | None) -> fx.GraphModule:
    for item in passes:
        gm = item.run(gm, job)
        gm.graph.lint()
        item.check(gm, job)
        if observer is not None:
            observer(item.name, gm)
    return gm
