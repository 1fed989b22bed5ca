"""The checker passes what generators write, and refuses every way to corrupt it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import MemoryLimitError, ScheduleError
from autopar.schedules.actions import COMPUTE, RECVS, SENDS, TRANSFERS, Action, Edge, Schedule, chain
from autopar.schedules.check import check_schedule
from autopar.schedules.generate import GENERATORS, Request, generate
from autopar.schedules.memory import StageMemory, in_flight, peaks

NAMES = [name for name in GENERATORS if name != "auto"]


def changed(schedule: Schedule, rank: int, change: Callable[[list[Action]], None]) -> Schedule:
    lists = [list(actions) for actions in schedule.ranks]
    change(lists[rank])
    return replace(schedule, ranks=tuple(map(tuple, lists)))


def remove(place: int, items: list[Action]) -> None:
    del items[place]


def double(place: int, items: list[Action]) -> None:
    items.insert(place, items[place])


def place_of(schedule: Schedule, rank: int, kind: str) -> int:
    return next(place for place, action in enumerate(schedule.ranks[rank]) if action.kind == kind)


@settings(max_examples=60)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.data())
def test_whatever_a_generator_makes_passes_also_with_skip_connections(
    name: str, ranks: int, microbatches: int, chunks: int, data: st.DataObject
) -> None:
    stages = ranks * chunks
    pairs = st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1)).filter(lambda pair: pair[0] < pair[1])
    skips: list[Edge] = data.draw(st.lists(pairs, max_size=3)) if stages > 1 else []
    request = Request(stages, microbatches, chunks, edges=tuple(dict.fromkeys((*chain(stages), *skips))))
    try:
        schedule = generate(name, request)
    except ScheduleError:
        assert chunks not in GENERATORS[name].virtual_stages or name in ("interleaved", "zb-h1", "pipedream-2bw")
        return
    check_schedule(schedule)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_a_send_before_its_result_or_a_recv_after_its_reader_is_refused(name: str) -> None:
    schedule = generate(name, Request(3, 4))
    swapped = 0
    for rank, actions in enumerate(schedule.ranks):
        for place, (first, second) in enumerate(itertools.pairwise(actions)):
            sends = second.kind in SENDS and first.kind in COMPUTE
            if not sends and not (first.kind in RECVS and second.kind in COMPUTE):
                continue
            if first.microbatch != second.microbatch or (sends != (first.kind in COMPUTE)):
                continue

            def swap(items: list[Action], at: int = place) -> None:
                items[at], items[at + 1] = items[at + 1], items[at]

            with pytest.raises(ScheduleError):
                check_schedule(changed(schedule, rank, swap))
            swapped += 1
    assert swapped >= 12


def test_two_ranks_that_both_receive_first_deadlock() -> None:
    """Neither order nor number is wrong here: only the run shows it."""
    edges = ((0, 1),)
    lists = (
        (Action("forward", 0, 0), Action("recv_gradient", 0, 0, peer=1), Action("send_activation", 0, 0, peer=1),
         Action("backward", 0, 0)),
        (Action("recv_activation", 1, 0, peer=0), Action("forward", 1, 0), Action("backward", 1, 0),
         Action("send_gradient", 1, 0, peer=0)),
    )  # fmt: skip
    with pytest.raises(ScheduleError, match="deadlock: 2 ranks wait"):
        check_schedule(Schedule("crossed", 2, 1, 1, lists, edges=edges))


def test_sends_in_another_order_than_their_recvs_are_refused() -> None:
    schedule = generate("gpipe", Request(2, 3))
    sends = [place for place, action in enumerate(schedule.ranks[0]) if action.kind == "send_activation"]

    def swap(items: list[Action]) -> None:
        items[sends[1]], items[sends[2]] = items[sends[2]], items[sends[1]]

    with pytest.raises(ScheduleError, match="transfer 1 from rank 0 to rank 1"):
        check_schedule(changed(schedule, 0, swap))


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_or_doubled_action_of_any_kind_is_refused(name: str) -> None:
    chunks = GENERATORS[name].virtual_stages.start
    schedule = generate(name, Request(2 * chunks, 4, chunks, update_every=2))
    kinds = {action.kind for actions in schedule.ranks for action in actions}
    for kind in sorted(kinds):
        rank = next(rank for rank in range(2) if any(action.kind == kind for action in schedule.ranks[rank]))
        place = place_of(schedule, rank, kind)
        with pytest.raises(ScheduleError):
            check_schedule(changed(schedule, rank, partial(remove, place)))
        if kind != "restore_weights":  # twice is the same as once
            with pytest.raises(ScheduleError):
                check_schedule(changed(schedule, rank, partial(double, place)))


def test_the_message_of_a_missing_backward_says_where() -> None:
    schedule = generate("1f1b", Request(2, 2))
    with pytest.raises(ScheduleError, match="stage 1 runs microbatch 0 by 1 forward, 0 backward") as error:
        check_schedule(changed(schedule, 1, lambda items: items.remove(Action("backward", 1, 0))))
    assert error.value.where == "rank 1"


def test_weights_before_inputs_are_refused() -> None:
    schedule = generate("zb-h1", Request(2, 2))

    def swap(items: list[Action]) -> None:
        first, second = Action("backward_input", 1, 1), Action("backward_weight", 1, 1)
        one, two = items.index(first), items.index(second)
        items[one], items[two] = second, first

    with pytest.raises(ScheduleError, match=r"backward_weight stage 1 microbatch 1: runs before it has the gradient"):
        check_schedule(changed(schedule, 1, swap))


@pytest.mark.parametrize("name", ["pipedream", "pipedream-vertical", "pipedream-2bw"])
def test_a_wrong_weight_version_is_refused(name: str) -> None:
    schedule = generate(name, Request(3, 9, update_every=3))
    for rank, actions in enumerate(schedule.ranks):
        for place, action in enumerate(actions):
            if action.version < 0:
                continue

            def other(items: list[Action], at: int = place, one: Action = action) -> None:
                items[at] = replace(one, version=one.version + 1)

            with pytest.raises(ScheduleError):
                check_schedule(changed(schedule, rank, other))


def test_a_foreign_stage_and_an_update_in_a_synchronous_schedule_are_refused() -> None:
    schedule = generate("1f1b", Request(2, 2))
    with pytest.raises(ScheduleError, match="not of a stage of this rank"):
        check_schedule(changed(schedule, 0, lambda items: items.append(Action("forward", 1, 0))))
    with pytest.raises(ScheduleError, match="synchronous schedule, whose weights stay"):
        check_schedule(changed(schedule, 0, lambda items: items.append(Action("optimizer_step", 0, 1, version=1))))


@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 8))
def test_the_peak_in_bytes_is_the_limit_that_just_holds(name: str, ranks: int, microbatches: int) -> None:
    chunks = GENERATORS[name].virtual_stages.start
    if name == "pipedream-2bw":
        microbatches *= ranks
    schedule = generate(name, Request(ranks * chunks, microbatches, chunks))
    memory = StageMemory(100, 10, 0.5, version_bytes=40, input_bytes=1, gradient_bytes=1)
    most = [peak.bytes for peak in peaks(schedule, memory)]
    check_schedule(schedule, memory=memory, limits_bytes=most)
    for rank in range(ranks):
        less = [limit - (0.5 if other == rank else 0) for other, limit in enumerate(most)]
        with pytest.raises(MemoryLimitError, match=f"rank {rank} holds .* 0.5 above its limit"):
            check_schedule(schedule, memory=memory, limits_bytes=less)


def test_microbatches_in_flight_are_those_of_the_papers() -> None:
    def flight(name: str, chunks: int = 1) -> list[float]:
        schedule = generate(name, Request(4 * chunks, 12, chunks))
        return [peak.bytes for peak in peaks(schedule, StageMemory(activation_bytes=1))]

    assert flight("gpipe") == [12, 12, 12, 12]
    assert flight("1f1b") == flight("pipedream") == [4, 3, 2, 1]
    assert in_flight(generate("1f1b", Request(4, 12))) == (4, 3, 2, 1)
    assert flight("zb-h1") == [4, 4, 4, 4]
    assert flight("zb-h2") == [7, 7, 7, 7]
    assert max(flight("zb-v", 2)) == 8  # half stages: the bytes of four whole ones
    assert max(flight("interleaved", 2)) == 11  # (1 + 3/8) of 4 whole ones, in half stages
    assert not any(action.kind in TRANSFERS for action in generate("1f1b", Request(1, 4)).ranks[0])
