"""Pipeline schedules: closed formulas against simulation, and schedules that are whole."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.pipeline import (
    Schedule,
    StageTimes,
    bubble_rate,
    closed_step_seconds,
    gpipe,
    interleaved,
    longest_rank_seconds,
    one_forward_one_backward,
    simulate_schedule,
)
from autopar.cost_models.zero_bubble import ZeroBubbleMemory, zero_bubble
from autopar.errors import UnpricedError

seconds = st.floats(0.5, 2.0)
times = st.builds(StageTimes, seconds, seconds, seconds, st.floats(0, 0.05))
ranks = st.integers(2, 6)


def in_flight(schedule: Schedule) -> int:
    most = 0
    for actions in schedule:
        alive = 0
        for action in actions:
            alive += {"forward": 1, "backward": -1, "backward_input": 0, "backward_weight": -1}[action.kind]
            most = max(most, alive)
    return most


@given(ranks, st.integers(1, 4), times)
def test_the_1f1b_formula_is_what_its_actions_take(count: int, multiple: int, one: StageTimes) -> None:
    many = count * multiple
    simulated = simulate_schedule(one_forward_one_backward(count, many), one).step_s
    closed = closed_step_seconds("1f1b", count, many, one)
    assert simulated == pytest.approx(closed, rel=0.02)


@given(ranks, st.integers(1, 12), times)
def test_the_gpipe_formula_is_what_its_actions_take(count: int, many: int, one: StageTimes) -> None:
    simulated = simulate_schedule(gpipe(count, many), one).step_s
    assert simulated == pytest.approx(closed_step_seconds("gpipe", count, many, one), rel=1e-6)


@given(ranks, st.integers(1, 3), st.integers(2, 4), seconds)
def test_the_interleaved_formula_is_what_its_actions_take_without_sends(
    count: int, multiple: int, chunks: int, work: float
) -> None:
    one = StageTimes(work, work, work)
    simulated = simulate_schedule(interleaved(count, count * multiple, chunks), one).step_s
    closed = closed_step_seconds("interleaved", count, count * multiple, one, chunks=chunks)
    assert simulated == pytest.approx(closed, rel=1e-6)


@given(ranks, st.integers(1, 3), st.integers(2, 3))
def test_every_rank_runs_every_microbatch_forward_and_backward_once(count: int, multiple: int, chunks: int) -> None:
    for schedule in (one_forward_one_backward(count, count * multiple), interleaved(count, count * multiple, chunks)):
        for rank, actions in enumerate(schedule):
            assert set(Counter(actions).values()) == {1}
            assert all(action.stage % count == rank for action in actions)


@settings(max_examples=15)
@given(ranks, st.integers(2, 10), times, st.sampled_from([1.0, 1.5, 2.0]))
def test_zero_bubble_schedules_are_whole_run_and_respect_memory(
    count: int, many: int, one: StageTimes, factor: float
) -> None:
    limit = factor * count
    schedule = zero_bubble(count, many, one, ZeroBubbleMemory(limit, weight_share=1.0))
    for actions in schedule:
        assert Counter(action.kind for action in actions) == dict.fromkeys(
            ("forward", "backward_input", "backward_weight"), many
        )
    assert in_flight(schedule) <= limit
    assert simulate_schedule(schedule, one).step_s >= many * one.work_s - 1e-9


def test_splitting_the_backward_shrinks_the_bubble() -> None:
    one = StageTimes(1.0, 1.0, 1.0)
    steps = [closed_step_seconds(name, 8, 24, one) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")]
    assert steps == sorted(steps, reverse=True)
    assert bubble_rate(steps[-1], 24, one) == 0.0
    found = simulate_schedule(zero_bubble(8, 24, one, ZeroBubbleMemory(16)), one)
    assert longest_rank_seconds(found) <= steps[2]


def test_stages_of_unequal_times_are_bound_by_the_slowest() -> None:
    uneven = {0: StageTimes(1, 1, 1), 1: StageTimes(2, 2, 2)}
    assert simulate_schedule(one_forward_one_backward(2, 10), uneven).step_s == pytest.approx(10 * 6 + 3)


def test_a_slow_rank_slows_the_whole_pipeline() -> None:
    schedule, one = one_forward_one_backward(4, 16), StageTimes(1, 1, 1)
    slow = simulate_schedule(schedule, one, rank_speeds=(1, 1, 0.5))
    assert slow.step_s > 1.7 * simulate_schedule(schedule, one).step_s


def test_an_unknown_schedule_is_unpriced_and_interleaving_needs_whole_groups() -> None:
    with pytest.raises(UnpricedError, match="sideways"):
        closed_step_seconds("sideways", 2, 2, StageTimes(1, 1, 1))
    with pytest.raises(ValueError, match="do not divide"):
        interleaved(4, 6, 2)
