"""Schedules as lists take what the formulas say, and no more than the papers' tables."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.pipeline import StageTimes, bubble_rate, closed_step_seconds
from autopar.schedules.actions import Schedule
from autopar.schedules.generate import Request, generate
from autopar.schedules.list_scheduling import ZeroBubbleMemory, zero_bubble
from autopar.schedules.memory import StageMemory, peaks
from autopar.schedules.synchronous import gpipe, interleaved, one_forward_one_backward, zb_h1, zb_h2
from autopar.schedules.timing import bubble_fraction, longest_rank_seconds, simulate_schedule
from autopar.schedules.v_shape import zb_v

seconds = st.floats(0.5, 2.0)
times = st.builds(StageTimes, seconds, seconds, seconds, st.floats(0, 0.05))
ranks = st.integers(2, 6)


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


@given(ranks, st.integers(1, 4))
def test_bubbles_over_ideal_time_are_the_published_shares(count: int, multiple: int) -> None:
    """(p-1)/m of 1F1B, (p-1)/(vm) interleaved, a third for ZB-H1, none for ZB-H2 and ZB-V: equal times, no sends."""
    one, many = StageTimes(1, 1, 1), 2 * count * multiple
    ideal = many * one.work_s

    def over_ideal(schedule: Schedule) -> float:
        return longest_rank_seconds(simulate_schedule(schedule, one)) / ideal - 1

    share = (count - 1) / many
    assert over_ideal(one_forward_one_backward(count, many)) == pytest.approx(share)
    assert over_ideal(interleaved(count, many, 2)) == pytest.approx(share / 2)
    assert over_ideal(zb_h1(count, many)) == pytest.approx(share / 3)
    assert over_ideal(zb_h2(count, many)) == pytest.approx(0, abs=1e-9)
    assert over_ideal(zb_v(count, many)) == pytest.approx(0, abs=1e-9)


@settings(max_examples=15)
@given(ranks, st.integers(2, 10), times, st.sampled_from([1.0, 1.5, 2.0]))
def test_list_scheduling_respects_memory_and_does_all_work(
    count: int, many: int, one: StageTimes, factor: float
) -> None:
    limit = factor * count
    schedule = zero_bubble(count, many, one, ZeroBubbleMemory(limit, weight_share=1.0))
    assert max(peak.bytes for peak in peaks(schedule, StageMemory(activation_bytes=1))) <= limit
    assert [len(actions) for actions in schedule.ranks] == [3 * many] * count
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


def test_transfers_in_the_lists_change_no_time_and_bubbles_are_idle_time() -> None:
    one = StageTimes(1, 1, 1, 0.25)
    for name in ("1f1b", "zb-h2"):
        schedule = generate(name, Request(3, 5, times=one))
        bare = {"1f1b": one_forward_one_backward, "zb-h2": zb_h2}[name](3, 5)
        simulation = simulate_schedule(schedule, one)
        assert simulation.step_s == simulate_schedule(bare, one).step_s
        assert bubble_fraction(simulation) == pytest.approx(1 - 5 * 3 / simulation.step_s)


def test_a_skip_connection_waits_for_its_source() -> None:
    """The last stage of three reads of the first: an own send, which here is the slowest."""
    one = {stage: StageTimes(1, 1, 1, 5.0 if stage == 0 else 0.0) for stage in range(3)}
    straight = generate("gpipe", Request(3, 1, times=one))
    skipping = generate("gpipe", Request(3, 1, times=one, edges=((0, 1), (1, 2), (0, 2))))
    assert simulate_schedule(straight, one).step_s == simulate_schedule(skipping, one).step_s == 14
