"""Of cuts that take equally long, the one that sends the fewest bytes: against all cuts there are."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from autopar.search.stage_ilp import solve_cut
from autopar.search.stage_problem import Cut, StageOption, StageProblem, evaluate_cut
from autopar.search.stage_ties import least_sent


def problem(
    crossing: list[float], work: list[float], *, asynchronous: bool = False, memory: float = 1e9
) -> StageProblem:
    layers, ones = len(work), np.ones(len(work))
    option = StageOption("keep", "gpu", 1, memory, np.array(work), ones, ones, np.zeros(layers))
    return StageProblem(np.array(crossing), (option,), (("gpu", 3),), 8, "remaining", asynchronous, 3)


def every_cut(given: StageProblem) -> list[Cut]:
    return [Cut((*ends, given.layers), (0, 0, 0)) for ends in combinations(range(1, given.layers), 2)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_cut_as_fast_sends_less(asynchronous: bool) -> None:
    random = np.random.default_rng(0)
    for _ in range(30):
        layers = int(random.integers(4, 10))
        crossing, work = random.integers(1, 9, layers).tolist(), random.integers(1, 4, layers).tolist()
        given = problem(crossing, work, asynchronous=asynchronous, memory=float(random.integers(8, 30)))
        sound = [cut for cut in every_cut(given) if not evaluate_cut(given, cut).violations]
        if not sound:
            continue
        fastest = min(evaluate_cut(given, cut).step_s for cut in sound)
        tied = [cut for cut in sound if evaluate_cut(given, cut).step_s <= fastest * (1 + 1e-9)]
        least = min(sum(crossing[end - 1] for end in cut.ends[:-1]) for cut in tied)
        found = solve_cut(given).cut
        assert found in tied and sum(crossing[end - 1] for end in found.ends[:-1]) == least


def test_a_cut_that_is_alone_in_its_time_stays() -> None:
    given = problem([5, 1, 5, 1, 1, 1], [1, 1, 1, 1, 1, 1])
    assert least_sent(given, Cut((2, 4, 6), (0, 0, 0))).ends == (2, 4, 6)
    assert least_sent(given, Cut((1, 4, 6), (0, 0, 0))).ends != (1, 4, 6)  # a stage of three layers may lie elsewhere
