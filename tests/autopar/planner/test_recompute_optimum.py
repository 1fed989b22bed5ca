"""The proven optimum of recomputation: never above the best of all choices, and near what the planner finds."""

from __future__ import annotations

from itertools import chain, combinations

import pytest

from autopar.planner.residency import USUAL, Residency
from benchmarks.recompute_optimum import least_bytes, proven_optimum
from tests.autopar.planner.test_recomputation import SMALL, fit_of


@pytest.mark.parametrize("name", SMALL)
def test_nothing_is_below_what_is_proven_and_the_choice_comes_near(name: str) -> None:
    fit = fit_of(*SMALL[name])
    kept, values = fit.measured(USUAL), sorted(fit.saved.values)
    subsets = chain.from_iterable(combinations(values, size) for size in range(len(values) + 1))
    tried = [fit.measured(Residency(fit.saved.closed(set(subset)))) for subset in subsets]
    peaks = {item.measured.peak_bytes for item in tried}
    assert 0 < least_bytes(fit, kept) <= min(peaks)
    for limit in sorted(peaks):
        best = min(item.seconds for item in tried if item.measured.peak_bytes <= limit)
        found, _ = fit.under(limit, kept)
        assert found is not None
        proven = proven_optimum(fit, (kept, found), limit, 30.0)
        assert proven.bound <= best * (1 + 1e-9) + 1e-12
        assert fit.step_s + found.seconds <= 1.02 * (fit.step_s + proven.bound)
