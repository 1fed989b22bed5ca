"""The harness for real ranks: results, errors and timeouts."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.gloo import run_on_ranks


def summed(value: torch.Tensor) -> torch.Tensor:
    total = value * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total


def fail_or_wait() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def test_results_come_back_in_rank_order() -> None:
    results = run_on_ranks(summed, 2, torch.ones(3))
    assert [result.tolist() for result in results] == [[3.0] * 3] * 2


def test_an_error_on_one_rank_is_raised_at_once_with_its_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 failed(.|\n)*rank one is unwell"):
        run_on_ranks(fail_or_wait, 2, timeout_s=60.0)
    assert time.monotonic() - start < 50.0


def test_ranks_that_hang_are_killed_after_the_timeout() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\]"):
        run_on_ranks(time.sleep, 2, 600, timeout_s=8.0)
