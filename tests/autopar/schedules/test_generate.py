"""Schedules by name: refusals, and `auto`, which is never worse than any other that fits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.pipeline import StageTimes
from autopar.errors import MemoryLimitError, ScheduleError
from autopar.schedules.check import check_schedule
from autopar.schedules.generate import GENERATORS, Request, generate
from autopar.schedules.memory import StageMemory, peaks
from autopar.schedules.optimal import Limits, shortest
from autopar.schedules.synchronous import one_forward_one_backward, zb_h1
from autopar.schedules.timing import longest_rank_seconds, simulate_schedule

SYNCHRONOUS = [name for name in GENERATORS if name != "auto" and not name.startswith("pipedream")]


@pytest.mark.parametrize(
    ("name", "request_", "message"),
    [
        ("sideways", Request(2, 2), "there is no schedule 'sideways'"),
        ("1f1b", Request(0, 2), "0 stages"),
        ("1f1b", Request(4, 2, 2), "1f1b has 1 virtual stages on each rank, not 2"),
        ("interleaved", Request(4, 2), "interleaved has 2 or more virtual stages on each rank, not 1"),
        ("zb-v", Request(5, 4, 2), "5 stages do not divide by 2"),
        ("interleaved", Request(8, 9, 2), "9 microbatches do not fall into 2 equal groups of at least 4"),
        ("pipedream-2bw", Request(4, 4, update_every=2), "fewer than the 4 ranks"),
        ("pipedream-2bw", Request(2, 5), "5 microbatches are not whole groups of 2"),
        ("1f1b", Request(3, 2, edges=((2, 0),)), "no edge from stage 2 to 0"),
    ],
)
def test_what_a_schedule_does_not_admit_is_refused(name: str, request_: Request, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as error:
        generate(name, request_)
    assert "fix:" in str(error.value)


@settings(max_examples=12)
@given(
    st.integers(2, 4),
    st.integers(1, 2),
    st.integers(2, 4),
    st.builds(StageTimes, *[st.sampled_from([1.0, 1.3, 2.0])] * 3, st.sampled_from([0.0, 0.2])),
    st.sampled_from([1.0, 1.5, 99.0]),
)
def test_auto_is_never_worse_than_another_that_fits(
    ranks: int, chunks: int, microbatches: int, times: StageTimes, factor: float
) -> None:
    memory = StageMemory(activation_bytes=1 / chunks, weight_share=0.5)
    request = Request(ranks * chunks, microbatches, chunks, times=times, memory=memory,
                      limits_bytes=[ranks * factor] * ranks)  # fmt: skip
    found = generate("auto", request)
    check_schedule(found, memory=memory, limits_bytes=request.limits_bytes)
    found_s = longest_rank_seconds(simulate_schedule(found, times))
    for name in SYNCHRONOUS:
        try:
            other = generate(name, request)
        except ScheduleError:
            continue
        if max(peak.bytes for peak in peaks(other, memory)) <= ranks * factor:
            assert found_s <= longest_rank_seconds(simulate_schedule(other, times)) + 1e-9


def test_auto_says_when_nothing_fits() -> None:
    request = Request(2, 4, memory=StageMemory(100, 10), limits_bytes=[105, 105])
    with pytest.raises(MemoryLimitError, match="no schedule of 2 stages and 4 microbatches fits"):
        generate("auto", request)


def test_a_searched_order_closes_the_bubble_that_the_fixed_ones_leave() -> None:
    times = dict.fromkeys(range(2), StageTimes(1, 1, 1))
    memory = Limits(dict.fromkeys(range(2), StageMemory(activation_bytes=1)), [3, 3])
    found = shortest(one_forward_one_backward(2, 4), times, memory)
    assert found is not None
    assert longest_rank_seconds(simulate_schedule(found, times)) == 12  # 4 x (1 + 1 + 1): no bubble
    assert max(peak.bytes for peak in peaks(found, memory.memory)) <= 3
    assert longest_rank_seconds(simulate_schedule(zb_h1(2, 4), times)) == 13
