"""Closed formulas of pipeline schedules; tests of the schedules hold them against simulation."""

from __future__ import annotations

import pytest

from autopar.cost_models.pipeline import StageTimes, bubble_rate, closed_step_seconds
from autopar.errors import UnpricedError


def test_a_bubble_is_the_idle_share_of_a_step() -> None:
    one = StageTimes(1, 1, 1)
    assert closed_step_seconds("1f1b", 4, 12, one) == 45
    assert bubble_rate(45, 12, one) == pytest.approx(3 / 15)


def test_an_unknown_schedule_is_unpriced() -> None:
    with pytest.raises(UnpricedError, match="sideways"):
        closed_step_seconds("sideways", 2, 2, StageTimes(1, 1, 1))
