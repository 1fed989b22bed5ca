"""The time that the searches of one plan share."""

from __future__ import annotations

import time

import pytest

from autopar.planner.budget import LEAST_S, MOST_SLOWDOWN, SHARE, Budget


def test_waiting_costs_nothing_and_lengthens_the_next_search(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, processor = [100.0], [7.0]
    monkeypatch.setattr(time, "monotonic", lambda: wall[0])
    monkeypatch.setattr(time, "process_time", lambda: processor[0])
    budget = Budget(30.0)
    assert budget.share_s == pytest.approx(30.0 * SHARE)
    wall[0], processor[0] = 120.0, 12.0  # four times slower than alone
    assert budget.left_s == 25.0
    assert budget.share_s == pytest.approx(25.0 * SHARE * 4.0)
    wall[0] = 1000.0
    assert budget.slowdown == MOST_SLOWDOWN
    processor[0] = 60.0
    assert budget.is_spent
    assert budget.share_s >= LEAST_S
