"""Why a pipeline is cut where it is, and run as it is: against the best way without that place, and other schedules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.errors import AutoparError
from autopar.planner.pipeline_search import PipelineSearch
from autopar.planner.segments import Numbers, Segments
from autopar.planner.stage_search import Proposal
from autopar.report.figures import bytes_text, seconds_text

SHOWN = 4  # other schedules and numbers of microbatches that are told of


@dataclass(frozen=True)
class CutAnswers:
    """Where the cuts of one pipeline come from: the search, and what was planned. See `plan.explain`.

    `cuts`: the places in the forward of one of `microbatches` before which stages begin.
    """

    search: PipelineSearch
    microbatches: int
    schedule: str
    cuts: tuple[int, ...]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied or sent plan is without its model."""
        return type(None), ()

    def why_cut(self, stage: int) -> str:
        """Why stage `stage`, from 1 on, begins where it does."""
        table, cut = self.search.segments(self.microbatches), self.cuts[stage - 1]
        if self.chosen is None or cut not in table.cuts:
            return "why this cut: it was given; the stage search would not cut here, or finds that it does not fit"
        place = table.cuts.index(cut)
        said = f"why this cut: {bytes_text(int(table.crossing_bytes[place]))} cross it per microbatch on one rank"
        others = np.delete(table.crossing_bytes[:-1], place)
        if len(others):
            said += f" (elsewhere {bytes_text(int(others.min()))} to {bytes_text(int(others.max()))})"
        return f"{said}; {self._without(table, place, self.chosen)}"

    @cached_property
    def chosen(self) -> Proposal | None:
        """What was planned, by the tables of the stage search; None where the search has it not."""
        table = self.search.segments(self.microbatches)
        for cut in table.cuts:
            if cut not in self.cuts:
                table = without_place(table, table.cuts.index(cut))
        try:
            found = self.search.proposed(table, self.microbatches, self.schedule, len(self.cuts) + 1)
        except AutoparError:
            return None
        return found if found.cuts == self.cuts else None

    def _without(self, table: Segments, place: int, chosen: Proposal) -> str:
        """The best cuts without one place, against those that were chosen."""
        fewer, stages = without_place(table, place), len(self.cuts) + 1
        try:
            other = self.search.proposed(fewer, self.microbatches, self.schedule, stages)
        except AutoparError as error:
            return f"without it nothing fits: {error.what}"
        more_s = other.step_s - chosen.step_s
        moved = [cut for cut in other.cuts if cut not in self.cuts]
        where = ", ".join(f"`{self.search.op_at(self.microbatches, cut)}`" for cut in moved)
        if more_s <= 0:
            return f"cut before {where} instead, a step takes no longer by the tables of the stage search"
        return f"without it, the best is to cut before {where}, and a step takes {seconds_text(more_s)} more"

    def why_schedule(self) -> str:
        """Why so many microbatches, and this schedule."""
        said = f"why {self.schedule} with {self.microbatches} microbatches: "
        own = self.microbatches, self.schedule
        others = [it for it in self.search.proposals() if (it.microbatches, it.schedule) != own]
        if not others or self.chosen is None:
            return said + "it was asked for, or the search has nothing else"
        texts = [
            f"{other.schedule} with {other.microbatches} takes {_against(other.step_s - self.chosen.step_s)}"
            for other in others[:SHOWN]
        ]
        return said + "; ".join(texts)


def _against(more_s: float) -> str:
    if more_s < 0:
        return f"{seconds_text(-more_s)} less a step by the tables: asked for, or the stages of the other do not fit"
    return f"{seconds_text(more_s)} more a step"


def without_place(table: Segments, place: int) -> Segments:
    """The segments where one place is not cut: the two that meet there are one."""

    def joined(values: Numbers) -> Numbers:
        return np.concatenate([values[:place], [values[place] + values[place + 1]], values[place + 2 :]])

    return replace(
        table,
        cuts=(*table.cuts[:place], *table.cuts[place + 1 :]),
        forward_s=joined(table.forward_s),
        backward_s=joined(table.backward_s),
        fixed_bytes=joined(table.fixed_bytes),
        saved_bytes=joined(table.saved_bytes),
        crossing_bytes=np.delete(table.crossing_bytes, place),
        sync_s=joined(table.sync_s),
    )
