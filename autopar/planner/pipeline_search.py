"""From a program and the pipeline asked for to proposals: microbatches cut, segments priced, the stage search run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.capture.program import OutputKind, Program
from autopar.cost_models.hardware import axis_links
from autopar.errors import AutoparError, MeshError, MicrobatchError, PlanError
from autopar.mesh import Mesh
from autopar.planner.cuts import Places, places, places_at, same_cuts
from autopar.planner.make import MEMORY_FRACTION, Options, Planner
from autopar.planner.microbatch_counts import Reference, reference_counts, segments_between, sensible_counts
from autopar.planner.pipeline_request import (
    PipelineRequest,
    rank_limits,
    rank_speeds,
    without_axis,
)
from autopar.planner.prices import Prices
from autopar.planner.segments import Segments, Shares, merged, segments_of, shares_of
from autopar.planner.stage_hosting import Hosted, hosted_parameters
from autopar.planner.stage_search import IN_FLIGHT, Line, Proposal, proposals, shapes
from autopar.sharding.discovery.book import RuleBook
from autopar.stages.accumulated import refuse_stale_buffers
from autopar.stages.assign import Anatomy, anatomy
from autopar.stages.microbatch import Microbatches, batch_size
from autopar.stages.staged import Staged, stage_program

FEW = 3  # numbers of microbatches that are all cut
SHARE_OF_TIME = 0.25  # of the planning time, for the layouts that the stage search counts with


@dataclass
class PipelineSearch:
    """`limits_bytes`: of each pipeline rank. `hosting`: which parameters it counts on the host."""

    program: Program
    mesh: Mesh
    axis: int
    options: Options
    request: PipelineRequest
    rules: RuleBook
    hosting: Hosted = Hosted.PINNED
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
        """The fastest first, as far as it is foreseen; see `exact`."""
        ranks, stages = self.mesh.shape[self.axis], self.request.stages
        if stages is not None and stages % ranks:
            raise MeshError(
                f"{stages} stages do not lie evenly on the {ranks} ranks of axis {self.mesh.axis_names[self.axis]!r}",
                fix=f"use a multiple of {ranks} stages",
            )
        return proposals(self.counts, self._foreseen, self._line, list(shapes(ranks, stages, self.request.schedule)))

    def exact(self, proposal: Proposal) -> Proposal:
        """A proposal of `proposals`, by the segments of its own microbatches. Raises as `proposals` does."""
        if self._references is None or proposal.microbatches == self._first_reference:
            return proposal
        count, stages = proposal.microbatches, len(proposal.cuts) + 1
        return self.proposed(self.segments(count), count, proposal.schedule, stages)

    def proposed(self, table: Segments, microbatches: int, schedule: str, stages: int) -> Proposal:
        """The best cuts between segments for one way to run them. Raises as `proposals` does."""
        return proposals([microbatches], lambda _: table, self._line, [(stages, schedule)])[0]

    def held_samples(self, proposal: Proposal) -> float:
        """The samples that are in flight at most on a rank: what a proposal holds beside parameters goes with them."""
        stages, count = len(proposal.cuts) + 1, proposal.microbatches
        known = {"all": count, "twice the stages": 2 * stages, "stages": stages}
        most = known.get(IN_FLIGHT[proposal.schedule], stages - 0.5)  # later stages of the others hold fewer
        return min(most, count) / count

    def op_at(self, count: int, cut: int) -> str:
        """The key of the op before which a microbatch of `count` is cut."""
        return str(self._anatomy(count).forward[cut].meta["key"])

    @cached_property
    def _line(self) -> Line:
        link = axis_links(self.mesh.profile, self.mesh.shape)[self.axis]
        return Line(rank_speeds(self.mesh, self.axis), self.limits_bytes, link)

    def of_one_microbatch(self) -> PipelineSearch | None:
        """The same search, of the batch as it is; None where that was tried, or the caller asked for something else."""
        if self.request.microbatches is not None or self.request.are_batches or 1 in self._pieces:
            return None
        return replace(self, request=replace(self.request, microbatches=1), _pieces={}, _anatomies={})

    def on_host(self, hosting: Hosted) -> PipelineSearch | None:
        """The same search, with parameters on the host; None where none but those that are pinned may be there."""
        every = hosted_parameters(self.program, self.options, hosting)
        asynchronous = self.request.is_asynchronous
        if asynchronous or self.inner.profile.device.is_host or every == self._hosted:
            return None
        options = replace(self.options, hosted=every) if hosting is Hosted.ALL else self.options
        return replace(self, hosting=hosting, options=options)

    @cached_property
    def _hosted(self) -> frozenset[str]:
        return hosted_parameters(self.program, self.options, self.hosting)

    def staged(self, proposal: Proposal) -> Staged:
        """The program cut as proposed."""
        staged = stage_program(self._cut(proposal.microbatches), proposal.cuts)
        if self.request.are_batches:
            refuse_stale_buffers(staged.stages)
        if self.request.is_asynchronous:
            _refuse_shared(staged, self.request)
        return staged

    @cached_property
    def counts(self) -> list[int]:
        """The numbers of microbatches to try: the one asked for, else those that suit the batch and a stage's mesh."""
        ranks = self.mesh.shape[self.axis]
        if self.request.microbatches is not None or self.request.are_batches:
            return [self.request.microbatches or ranks]
        counts = sensible_counts(batch_size(self.program), self.inner.shape)
        try:
            self._cut(reference_counts(counts, ranks)[0] if len(counts) > FEW else counts[-1])
        except MicrobatchError:
            return [1]
        return counts

    def _cut(self, count: int) -> Microbatches:
        if count not in self._pieces:
            self._pieces[count] = self.request.pieces(self.program, count, self.rules.rules_of)
        return self._pieces[count]

    def _anatomy(self, count: int) -> Anatomy:
        if count not in self._anatomies:
            self._anatomies[count] = anatomy(self._cut(count).pieces[0])
        return self._anatomies[count]

    def segments(self, count: int) -> Segments:
        """The segments of one of `count` microbatches."""
        found = self._anatomy(count)
        return self._segments(count, merged(places(found, Prices(self.inner))))

    def _segments(self, count: int, known: Places) -> Segments:
        prices = Prices(self.inner, microbatches=self._cut(count).of_a_step)
        optimizer = self.options.optimizer
        return segments_of(self._anatomy(count), known, prices, optimizer, self._shares, self._hosted)

    def _foreseen(self, count: int) -> Segments:
        """The segments of one of `count` microbatches, from those of two other numbers where there are many."""
        if self._references is None:
            return self.segments(count)
        return segments_between(*self._references, batch_size(self.program) / count)

    @property
    def _first_reference(self) -> int:
        """The number of microbatches at whose own segments all others are cut."""
        return reference_counts(self.counts, self.mesh.shape[self.axis])[0]

    @cached_property
    def _references(self) -> tuple[Reference, Reference] | None:
        """Two numbers of microbatches, from which the segments of all others follow; None where there are few."""
        if len(self.counts) <= FEW:
            return None
        size = batch_size(self.program)
        first, second = reference_counts(self.counts, self.mesh.shape[self.axis])
        own, found = self.segments(first), self._anatomy(second)
        same = same_cuts(self._anatomy(first), own.cuts, found)
        if same is None:
            return None
        other = self._segments(second, places_at(found, same, Prices(self.inner)))
        return Reference(size / first, own), Reference(size / second, other)

    @cached_property
    def _shares(self) -> Shares:
        """Of the layouts that one plan gives the whole of a microbatch on the mesh of a stage."""
        ranks = self.inner.size
        if ranks == 1:
            return Shares(1.0, 1.0)
        count = min(self._pieces)
        found = self._anatomy(count)
        options = replace(
            self.options,
            microbatches=self._cut(count).of_a_step,
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
