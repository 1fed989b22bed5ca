"""Proposals for a pipeline: slow and small ranks get less, memory is met by recomputing, more microbatches pay."""

from __future__ import annotations

import numpy as np
import pytest

import autopar
from autopar.cost_models.hardware import axis_links
from autopar.errors import MemoryLimitError, PlanError
from autopar.planner.cuts import Places
from autopar.planner.segments import Segments, merged
from autopar.planner.stage_search import Line, proposals, shapes

MESH = autopar.Mesh((2,), ("pp",), hardware="h100")
LINK = axis_links(MESH.profile, MESH.shape)[0]


def segments(microbatches: int, count: int = 12) -> Segments:
    """Equal segments; one second forward and two backward for the whole batch, 100 bytes saved."""
    one = np.ones(count) / microbatches
    return Segments(tuple(range(1, count)), one, 2 * one, np.ones(count), 100 * one, one, np.zeros(count))


def line(speeds: tuple[float, ...] = (1.0, 1.0), memory: tuple[float, ...] = (1e9, 1e9)) -> Line:
    return Line(speeds, memory, LINK)


def test_stages_are_as_long_as_their_ranks_are_fast() -> None:
    (even, *_) = proposals([8], segments, line(), [(2, "1f1b")])
    (uneven, *_) = proposals([8], segments, line((0.5, 1.0)), [(2, "1f1b")])
    assert even.cuts == (6,) and uneven.cuts == (4,)


def test_more_microbatches_leave_less_of_a_bubble_and_zero_bubble_less_still() -> None:
    found = proposals([2, 8], segments, line(), list(shapes(2, None, None)))
    assert found[0].microbatches == 8 and found[0].schedule in ("zb-h1", "zb-h2")
    steps = {(it.microbatches, it.schedule): it.step_s for it in found}
    assert steps[8, "1f1b"] == pytest.approx(36 / 2 * (1 + 1 / 8), rel=1e-3)  # (p - 1) / m over what two ranks need
    assert steps[2, "1f1b"] > steps[8, "1f1b"] > steps[8, "zb-h1"]


def test_where_activations_do_not_fit_a_stage_recomputes_and_where_nothing_fits_it_says_so() -> None:
    free = proposals([4], segments, line(), [(2, "1f1b")])[0]
    tight = proposals([4], segments, line(memory=(220.0, 220.0)), [(2, "1f1b")])[0]
    assert tight.step_s > free.step_s
    with pytest.raises(MemoryLimitError, match="even where everything is recomputed"):
        proposals([4], segments, line(memory=(5.0, 5.0)), [(2, "1f1b")])


def test_more_stages_than_segments_are_refused() -> None:
    with pytest.raises(PlanError, match="use stages=12 or fewer"):
        proposals([4], segments, line(), [(14, "interleaved")])


def test_one_stage_on_each_rank_unless_more_are_asked_for() -> None:
    assert {stages for stages, _ in shapes(4, None, None)} == {4}
    assert list(shapes(4, 8, None)) == [(8, "interleaved"), (8, "zb-v")]
    assert list(shapes(4, 12, None)) == [(12, "interleaved")]
    assert list(shapes(4, None, "zb-v")) == [(8, "zb-v")]


def test_no_segment_is_left_without_a_parameter() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        count = int(random.integers(2, 200))
        readers = random.integers(0, 2, count)
        readers[int(random.integers(count))] = 1
        found = merged(Places(tuple(range(1, count)), random.uniform(1, 2, count), np.ones(count - 1), readers))
        assert found.readers.min() > 0 and len(found.seconds) == len(found.cuts) + 1 <= 96
        assert found.readers.sum() == readers.sum()
