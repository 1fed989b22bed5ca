"""Schedules as data: where stages live, and what a schedule refuses to be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.schedules.actions import Action, Placement, Schedule, chain, rank_of, stage_of


@given(st.integers(1, 7), st.integers(1, 4), st.sampled_from(["loop", "v"]))
def test_every_stage_lives_on_one_rank_and_every_rank_has_as_many(
    ranks: int, chunks: int, placement: Placement
) -> None:
    stages = {stage_of(rank, chunk, ranks, placement): rank for rank in range(ranks) for chunk in range(chunks)}
    assert sorted(stages) == list(range(ranks * chunks))
    assert all(rank_of(stage, ranks, placement) == rank for stage, rank in stages.items())


def test_a_v_turns_around_on_the_last_rank() -> None:
    schedule = Schedule("none", 8, 1, 2, ((),) * 4, "v")
    assert [schedule.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert schedule.edges == chain(8)


def test_stages_that_do_not_fill_the_ranks_are_refused() -> None:
    with pytest.raises(ScheduleError, match="5 stages are not 2 ranks x 2 virtual stages"):
        Schedule("none", 5, 1, 2, ((), ()))


def test_an_action_says_what_it_is() -> None:
    assert str(Action("send_activation", 0, 3, peer=1)) == "send_activation stage 0 microbatch 3 to 1"
    assert str(Action("restore_weights", 1, 2, version=4)) == "restore_weights stage 1 microbatch 2 version 4"
