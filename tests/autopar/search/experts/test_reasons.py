"""Why an expert is where it is: the exchange that is told of is the best one, by every exchange tried."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest

from autopar.errors import ExpertPlacementError
from autopar.search import place_experts
from autopar.search.experts.balance import device_loads


def test_what_an_exchange_would_make_of_the_slowest_device_is_the_least_of_all() -> None:
    load = np.random.default_rng(0).zipf(1.6, (2, 8)).clip(max=300).astype(float)
    found = place_experts(load, (4,), time_limit_s=5)
    for layer, expert in product(range(2), range(8)):
        text = found.why(layer, expert)
        slots = found.assignment[layer]
        (home,) = np.flatnonzero((slots == expert).any(1))
        assert f"on device {home} " in text.splitlines()[0]
        after = []
        for device, place in product(range(4), range(2)):
            if device != home:
                tried = slots.copy()
                tried[home][list(tried[home]).index(expert)], tried[device, place] = slots[device, place], expert
                after.append(device_loads(load[layer], tried).max())
        more = min(after) - found.device_load[layer].max()
        told = re.search(r"it would have (?:(\S+) more|no less|less)", text)
        assert told is not None and more >= -1e-9
        assert float(told.group(1) or 0.0) == pytest.approx(more, rel=1e-3)


def test_an_expert_that_is_not_there_is_refused() -> None:
    found = place_experts([[3.0, 1.0]], (2,), time_limit_s=5)
    with pytest.raises(ExpertPlacementError, match="no expert 2 of layer 0"):
        found.why(0, 2)
