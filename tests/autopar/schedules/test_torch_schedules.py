"""Our action order is that of torch.distributed.pipelining, where both have a schedule."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from autopar.schedules.actions import Action, Schedule
from autopar.schedules.synchronous import gpipe, interleaved, one_forward_one_backward, zb_h1
from autopar.schedules.v_shape import zb_v

KINDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
SIZES = [(2, 2), (2, 8), (4, 4), (4, 12), (8, 16)]
Lists = list[list[tuple[str, int, int]]]


def without_process_group(name: str, **attributes: Any) -> Any:
    """A schedule of torch with what its order is computed from, and nothing else."""
    kind = getattr(theirs, name)
    made = object.__new__(kind)
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


def order_of(actions: list[Any]) -> list[tuple[str, int, int]]:
    """Their compute actions: no waits, no reduction of gradients over replicas."""
    return [
        (KINDS[item.computation_type.value], item.stage_index, item.microbatch_index)
        for item in actions
        if item is not None and item.computation_type.value in KINDS
    ]


def multi_stage_order(name: str, ranks: int, microbatches: int, chunks: int) -> Lists:
    rounds = max(1, microbatches // ranks)
    made = without_process_group(
        name,
        pp_group_size=ranks,
        n_local_stages=chunks,
        num_stages=ranks * chunks,
        _n_microbatches=microbatches,
        number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds,
    )
    return [order_of(made._calculate_single_rank_operations(rank)) for rank in range(ranks)]


def ours(schedule: Schedule) -> Lists:
    return [[(item.kind, item.stage, item.microbatch) for item in actions] for actions in schedule.ranks]


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_gpipe_and_1f1b_are_in_torchs_order(ranks: int, microbatches: int) -> None:
    orders = {
        name: without_process_group(name, _num_stages=ranks, _n_microbatches=microbatches)._get_pipeline_order()
        for name in ("ScheduleGPipe", "Schedule1F1B")
    }
    assert [order_of(orders["ScheduleGPipe"][rank]) for rank in range(ranks)] == ours(gpipe(ranks, microbatches))
    found = ours(one_forward_one_backward(ranks, microbatches))
    # Torch's list of the last rank, which it only prints, counts forwards from 1: its kinds are compared.
    assert [order_of(orders["Schedule1F1B"][rank]) for rank in range(ranks - 1)] == found[:-1]
    assert [item[0] for item in order_of(orders["Schedule1F1B"][ranks - 1])] == [item[0] for item in found[-1]]


@pytest.mark.parametrize(("ranks", "microbatches"), [*SIZES, (4, 10), (4, 3)])
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_schedules_are_in_torchs_order(ranks: int, microbatches: int, chunks: int) -> None:
    expected = multi_stage_order("ScheduleInterleaved1F1B", ranks, microbatches, chunks)
    assert ours(interleaved(ranks, microbatches, chunks)) == expected


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("chunks", [1, 2])
def test_zb_h1_is_in_torchs_order(ranks: int, microbatches: int, chunks: int) -> None:
    expected = multi_stage_order("ScheduleInterleavedZeroBubble", ranks, microbatches, chunks)
    assert ours(zb_h1(ranks, microbatches, chunks)) == expected


@pytest.mark.parametrize(("ranks", "microbatches"), [*SIZES, (4, 3), (3, 1)])
def test_zb_v_is_in_torchs_order(ranks: int, microbatches: int) -> None:
    schedule = zb_v(ranks, microbatches)
    assert ours(schedule) == multi_stage_order("ScheduleZBVZeroBubble", ranks, microbatches, 2)
    assert Action("forward", 2 * ranks - 1, 0) in schedule.ranks[0]
