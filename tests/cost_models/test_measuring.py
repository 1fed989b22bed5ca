"""Timing in rounds: the median time of each call counts, and no call of one is timed beside itself."""

from __future__ import annotations

import time
import weakref

import torch

from autopar.cost_models.measuring import LEAST_ROUNDS, Effort, Kept, World, usual_seconds

ALONE = World(torch.device("cpu"))


def busy(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_calls_take_turns_and_the_median_time_of_each_counts() -> None:
    order: list[str] = []
    wanted = iter([0.05, 0.03, 0.01, 0.02, 0.02, 0.08])

    def changing() -> None:
        order.append("changing")
        busy(next(wanted))

    def steady() -> None:
        order.append("steady")
        busy(0.002)

    told: list[int] = []
    seconds = usual_seconds([changing, steady], ALONE, Effort(6, 60.0), told.append)
    assert order == ["changing", "steady"] * 6
    assert told == list(range(6))
    assert 0.02 <= seconds[0] < 0.03
    assert 0.002 <= seconds[1] < 0.01


def test_one_thread_is_not_billed_for_the_time_it_sleeps() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        (seconds,) = usual_seconds([lambda: time.sleep(0.05)], ALONE, Effort(3, 60.0), lambda _: None)
    finally:
        torch.set_num_threads(threads)
    assert seconds < 0.02


def test_no_round_begins_after_the_time_is_up() -> None:
    told: list[int] = []
    usual_seconds([lambda: busy(0.001)], ALONE, Effort(1000, 0.0), told.append)
    assert len(told) == LEAST_ROUNDS + 1


def test_what_calls_return_is_kept_up_to_some_bytes() -> None:
    kept, freed = Kept(most_bytes=100), list[int]()
    for number in range(4):
        result = torch.ones(10)  # 40 bytes
        weakref.finalize(result, freed.append, number)
        kept.keep((result, "with it"))
        del result
    assert freed == [0, 1]
    assert kept.bytes == 80
