"""Load by expert and by device, before and after a new placement: a table, a plot."""

from __future__ import annotations

import pytest

from autopar.errors import ExpertPlacementError
from autopar.report.experts import ExpertReport
from autopar.search import place_experts

LOAD = [10, 70, 10, 10]


def test_the_table_has_the_load_of_each_device_before_and_after() -> None:
    placement = place_experts([LOAD], (2,), replicas=6)
    report = ExpertReport("mixture", LOAD, {"before": [[0, 1], [2, 3]], "after": placement.assignment[0].tolist()})
    assert report.device_load["before"].tolist() == [80, 20]
    assert report.device_load["after"].tolist() == placement.device_load[0].tolist()
    assert report.imbalance["before"] == 1.6 and report.imbalance["after"] < 1.1
    text = str(report)
    assert all(word in text for word in ("mixture", "experts before", "load after", "80", "1.600")), text


def test_the_plot_has_bars_for_experts_and_for_devices() -> None:
    figure = ExpertReport("mixture", LOAD, {"before": [[0, 1], [2, 3]]}).plot()
    heights = [[bar.get_height() for bar in axes.patches] for axes in figure.axes]
    assert heights == [LOAD, [80, 20]]


def test_a_placement_of_other_experts_is_refused() -> None:
    with pytest.raises(ExpertPlacementError, match=r"disagree about experts \[3\]"):
        ExpertReport("mixture", LOAD, {"before": [[0, 1], [2]]})


def test_without_load_all_is_even() -> None:
    assert ExpertReport("mixture", [0, 0], {"now": [[0], [1]]}).imbalance == {"now": 1.0}
