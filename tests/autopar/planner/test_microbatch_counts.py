"""Numbers of microbatches that are tried, and prices of microbatches that were never cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

import autopar
from autopar.arguments import make_options
from autopar.capture.trace import capture
from autopar.planner.microbatch_counts import (
    Reference,
    reference_counts,
    segments_between,
    sensible_counts,
)
from autopar.planner.pipeline_request import PipelineRequest
from autopar.planner.pipeline_search import PipelineSearch
from autopar.planner.segments import Segments


def test_a_microbatch_divides_over_the_longest_axis_of_a_stage_alone() -> None:
    assert sensible_counts(1536, (16, 8)) == [1, 2, 4, 8, 16, 32, 48, 96]  # not over all 128 ranks: few would be left
    assert sensible_counts(8, (1,)) == [1, 2, 4, 8]
    assert sensible_counts(6, (4, 2)) == [1, 3]  # no microbatch divides over 4
    assert sensible_counts(7, (4,)) == [1, 7]
    assert sensible_counts(1, (4,)) == [1]


def test_many_counts_are_thinned_all_along() -> None:
    counts = sensible_counts(5040, (1,))
    assert len(counts) == 8 and counts[0] == 1 and counts[-1] == 5040
    assert max(above / below for below, above in pairwise(counts)) <= 6


def test_references_are_two_numbers_that_are_no_single_microbatch() -> None:
    for ranks in (2, 8, 64):
        first, second = reference_counts([1, 2, 4, 8, 16, 32, 48, 96], ranks)
        assert first != second and min(first, second) > 1
    assert reference_counts([1, 2, 4, 8], 4) == (8, 4)


def table(seconds: float, fixed: float = 7.0) -> Segments:
    one = np.array([1.0, 2.0])
    return Segments((3,), seconds * one, 2 * seconds * one, fixed * one, seconds * one, seconds * one, one)


def test_prices_are_a_constant_and_a_share_of_the_samples() -> None:
    found = segments_between(Reference(4, table(0.5)), Reference(8, table(0.9)), 16)
    np.testing.assert_allclose(found.forward_s, 1.7 * np.array([1.0, 2.0]))
    np.testing.assert_allclose(found.fixed_bytes, 7.0 * np.array([1.0, 2.0]))
    less = segments_between(Reference(4, table(0.1)), Reference(8, table(0.5)), 1)  # the line would pass below zero
    assert (less.forward_s > 0).all()


def make_search(model: torch.nn.Module, batch: torch.Tensor, mesh: autopar.Mesh) -> PipelineSearch:
    options = make_options("ilp", None, torch.optim.AdamW, (), None)
    program = capture(model, (batch,), {})
    return PipelineSearch(program, mesh, 0, options, PipelineRequest(mesh.shape[0]), options.rule_book(mesh))


@pytest.fixture(scope="module")
def search() -> PipelineSearch:
    layers = [torch.nn.Linear(64, 64) for _ in range(8)]
    return make_search(torch.nn.Sequential(*layers), torch.ones(256, 64), autopar.Mesh((2, 2), ("pp", "dp")))


def test_what_is_foreseen_of_a_microbatch_is_near_what_it_costs(search: PipelineSearch) -> None:
    for count in search.counts[1:]:
        foreseen, own = search._foreseen(count), search.segments(count)
        seconds, own_s = (float((it.forward_s + it.backward_s).sum()) for it in (foreseen, own))
        assert seconds == pytest.approx(own_s, rel=0.02)
        assert foreseen.saved_bytes.sum() == pytest.approx(own.saved_bytes.sum())


def test_few_numbers_are_cut_however_many_are_tried(search: PipelineSearch) -> None:
    fresh = make_search(
        torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]), torch.ones(256, 64), search.mesh
    )
    tried = {it.microbatches for it in fresh.proposals()}
    assert len(tried) == 8 and len(fresh._pieces) == 2
    best = fresh.proposals()[0]
    assert fresh.exact(best).step_s == pytest.approx(best.step_s, rel=0.1)
