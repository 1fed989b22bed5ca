"""What to recompute first: as little as fits, and what is foreseen is what the emitted program holds."""

from __future__ import annotations

import torch

from autopar.planner.cheapest_first import CheapestFirst
from autopar.planner.residency import USUAL
from tests.autopar.planner.test_recomputation import blocks, fit_of


def test_what_is_dropped_first_fits_as_foreseen_and_costs_more_the_less_there_is() -> None:
    fit = fit_of(blocks(), torch.randn(128, 16))
    kept = fit.measured(USUAL)
    first, constant, peak = CheapestFirst(fit.of), fit.beside(kept), kept.measured.peak_bytes
    counts = range(0, len(first.order) + 1, len(first.order) // 8)
    floor = min(float(fit.of.levels(first.residency(first.order[:it]), constant).max()) for it in counts)
    assert floor < 0.95 * peak
    assert first.under(constant, peak) == USUAL
    assert first.under(constant, 0.0) is None
    seconds = [0.0]
    for limit in (0.5 * (floor + peak), 1.01 * floor):
        found = first.under(constant, limit)
        assert found is not None and fit.of.levels(found, constant).max() <= limit
        assert fit.measured(found).measured.peak_bytes <= limit
        seconds.append(fit.seconds(found))
    assert seconds == sorted(seconds) and seconds[1] > 0
