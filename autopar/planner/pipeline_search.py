"""From a program and the pipeline asked for to proposals: microbatches cut, segments priced, the stage search run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.capture.program import OutputKind, Program
from autopar.cost_models.hardware import axis_links
from autopar.errors import AutoparError, MeshError, MicrobatchError, PlanError
from autopar.mesh import Mesh
from autopar.planner.cuts import places
from autopar.planner.make import MEMORY_FRACTION, Options, Planner
from autopar.planner.pipeline_request import (
    PipelineRequest,
    rank_limits,
    rank_speeds,
    without_axis,
)
from autopar.planner.prices import Prices
from autopar.planner.segments import Segments, Shares, segments_of, shares_of
from autopar.planner.stage_search import Line, Proposal, proposals, shapes
from autopar.sharding.discovery.book import RuleBook
from autopar.stages.assign import Anatomy, anatomy
from autopar.stages.microbatch import Microbatches, batch_size, cut_microbatches, independent_microbatches
from autopar.stages.staged import Staged, stage_program

PER_RANK = (1, 2, 4)  # microbatches to try for each rank
SHARE_OF_TIME = 0.25  # of the planning time, for the layouts that the stage search counts with


@dataclass
class PipelineSearch:
    """`limits_bytes`: of each pipeline rank."""

    program: Program
    mesh: Mesh
    axis: int
    options: Options
    request: PipelineRequest
    rules: RuleBook
    _pieces: dict[int, Microbatches] = field(default_factory=dict)
    _anatomies: dict[int, Anatomy] = field(default_factory=dict)

    @cached_property
    def inner(self) -> Mesh:
        """The mesh of one stage."""
        return without_axis(self.mesh, self.axis)

    @cached_property
    def limits_bytes(self) -> tuple[int, ...]:
        return rank_limits(self.mesh, self.axis, self.options.memory_limit_bytes, MEMORY_FRACTION)

    def proposals(self) -> list[Proposal]:
        """The fastest first."""
        ranks, stages = self.mesh.shape[self.axis], self.request.stages
        if stages is not None and stages % ranks:
            raise MeshError(
                f"{stages} stages do not lie evenly on the {ranks} ranks of axis {self.mesh.axis_names[self.axis]!r}",
                fix=f"use a multiple of {ranks} stages",
            )
        return proposals(self._counts(), self.segments, self._line, list(shapes(ranks, stages, self.request.schedule)))

    def proposed(self, table: Segments, microbatches: int, schedule: str, stages: int) -> Proposal:
        """The best cuts between segments for one way to run them. Raises as `proposals` does."""
        return proposals([microbatches], lambda _: table, self._line, [(stages, schedule)])[0]

    def op_at(self, count: int, cut: int) -> str:
        """The key of the op before which a microbatch of `count` is cut."""
        return str(self._anatomy(count).forward[cut].meta["key"])

    @cached_property
    def _line(self) -> Line:
        link = axis_links(self.mesh.profile, self.mesh.shape)[self.axis]
        return Line(rank_speeds(self.mesh, self.axis), self.limits_bytes, link)

    def of_one_microbatch(self) -> PipelineSearch | None:
        """The same search, of the batch as it is; None where that was tried, or the caller asked for something else."""
        if self.request.microbatches is not None or self.request.is_asynchronous or 1 in self._pieces:
            return None
        return replace(self, request=replace(self.request, microbatches=1), _pieces={}, _anatomies={})

    def staged(self, proposal: Proposal) -> Staged:
        """The program cut as proposed."""
        staged = stage_program(self._cut(proposal.microbatches), proposal.cuts)
        if self.request.is_asynchronous:
            _refuse_shared(staged, self.request)
        return staged

    def _counts(self) -> list[int]:
        """The numbers of microbatches to try: about one, two and four per rank, such that a microbatch divides over
        the ranks of a stage as the batch does, where it can be."""
        ranks = self.mesh.shape[self.axis]
        if self.request.microbatches is not None or self.request.is_asynchronous:
            return [self.request.microbatches or ranks]
        size = batch_size(self.program)
        divisors = [count for count in range(1, size + 1) if size % count == 0]
        whole = [count for count in divisors if (size // count) % self.inner.size == 0] or divisors
        most = [per_rank * ranks for per_rank in PER_RANK]
        counts = sorted({max([count for count in whole if count <= limit] or [min(whole)]) for limit in most})
        try:
            for count in counts:
                self._cut(count)
        except MicrobatchError:
            return [1]
        return counts

    def _cut(self, count: int) -> Microbatches:
        if count not in self._pieces:
            if self.request.is_asynchronous:
                self._pieces[count] = independent_microbatches(self.program, count)
            else:
                self._pieces[count] = cut_microbatches(self.program, count, self.rules.rules_of)
        return self._pieces[count]

    def _anatomy(self, count: int) -> Anatomy:
        if count not in self._anatomies:
            self._anatomies[count] = anatomy(self._cut(count).pieces[0])
        return self._anatomies[count]

    def segments(self, count: int) -> Segments:
        """The segments of one of `count` microbatches."""
        prices, found = Prices(self.inner), self._anatomy(count)
        return segments_of(found, places(found, prices), prices, self.options.optimizer, self._shares)

    @cached_property
    def _shares(self) -> Shares:
        """Of the layouts that one plan gives the whole of a microbatch on the mesh of a stage."""
        ranks = self.inner.size
        if ranks == 1:
            return Shares(1.0, 1.0)
        found = self._anatomy(min(self._pieces))
        options = replace(
            self.options,
            memory_limit_bytes=sum(self.limits_bytes),
            time_limit_s=SHARE_OF_TIME * self.options.time_limit_s,
        )
        try:
            entries = Planner(found.program, self.inner, options).foreseen_entries()
        except AutoparError:
            return Shares(1 / ranks, 1 / ranks)  # the stages' own plans say what is wrong
        return shares_of(found, entries, Prices(self.inner))


def _refuse_shared(staged: Staged, request: PipelineRequest) -> None:
    losses = [output for output in staged.program.outputs if output.kind is OutputKind.LOSS]
    if len(losses) != 1:
        raise PlanError(
            f"{request.schedule} needs the loss inside of the model: microbatches go back as soon as they are through",
            fix="return the loss from the model, or use a synchronous schedule",
        )
    if staged.first.shared:
        name, stages = next(iter(staged.first.shared.items()))
        raise PlanError(
            f"{name!r} is shared by stages {', '.join(map(str, stages))}, which {request.schedule} updates at "
            "different times",
            fix="use a synchronous schedule, or untie the parameter",
        )
