"""Proposals for a pipeline that are planned one after the other, until one fits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from autopar.errors import MemoryLimitError, ScheduleError
from autopar.planner.pipeline import Effort, _Attempts
from autopar.planner.stage_search import Proposal


@dataclass
class Search:
    """Proposals that hold 3, 2 and 1 samples, and what those raise whose own segments refuse them."""

    refusals: dict[str, Exception]
    asked: list[str] = field(default_factory=list)

    def proposals(self) -> list[Proposal]:
        return [Proposal(4, schedule, (1,), float(place)) for place, schedule in enumerate(("zb-h2", "zb-h1", "1f1b"))]

    def held_samples(self, proposal: Proposal) -> float:
        return 3.0 - proposal.step_s

    def exact(self, proposal: Proposal) -> Proposal:
        self.asked.append(proposal.schedule)
        if proposal.schedule in self.refusals:
            raise self.refusals[proposal.schedule]
        return proposal


def first_that_fits(search: Any, patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(_Attempts, "_planned", lambda _, proposal: proposal)
    return _Attempts(search, Effort.RECOMPUTE).run()


def test_a_proposal_that_its_own_segments_refuse_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search({"zb-h2": ScheduleError("too many in flight"), "zb-h1": MemoryLimitError("too much")})
    assert first_that_fits(search, monkeypatch).schedule == "1f1b"
    assert search.asked == ["zb-h2", "zb-h1", "1f1b"]


def test_where_none_fits_the_first_refusal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = {"zb-h2": ScheduleError("first"), "zb-h1": MemoryLimitError("second"), "1f1b": ScheduleError("third")}
    with pytest.raises(ScheduleError, match="first"):
        first_that_fits(Search(dict(refusals)), monkeypatch)
