"""On PipeDream's published profiles the stage search finds its partitions, or shorter ones under the same model."""

from __future__ import annotations

import pytest

from autopar.search.stage_ilp import solve_cut
from autopar.search.stage_problem import Cut, best_even_cut, evaluate_cut
from benchmarks.stage_search import best_with_replicas, make_problem, read_profile


@pytest.mark.parametrize(
    ("model", "machines", "bytes_per_s", "data_parallel_s", "theirs_s", "published"),
    [  # seconds of the PipeDream repository's optimizer, and partitions of the papers
        ("vgg16", 4, 1.25e9, 0.5001918556, 0.1744984992, (3, 1)),
        ("vgg16", 16, 1.25e9, 0.1458015955, 0.0465874887, (15, 1)),
        ("alexnet", 16, 1.25e9, 0.0511581925, 0.0070595952, (15, 1)),
        ("gnmt", 4, 1.25e9, 0.4873922848, 0.025868, (1, 1, 1, 1)),
    ],
)
def test_the_known_partition_or_a_shorter_one_is_found(
    model: str, machines: int, bytes_per_s: float, data_parallel_s: float, theirs_s: float, published: tuple[int, ...]
) -> None:
    problem = make_problem(read_profile(model), machines, bytes_per_s)
    whole = evaluate_cut(problem, Cut((problem.layers,), (machines - 1,)))
    assert whole.step_s == pytest.approx(data_parallel_s, rel=1e-9)  # the same model of a stage
    found, even = solve_cut(problem), best_even_cut(problem)
    assert even is not None
    others_s = min(best_with_replicas(problem, published), even[1].step_s)
    assert found.cost.step_s <= min(theirs_s * (1 + 1e-6), others_s * (1 + 1e-12))  # published digits; rounding
    assert found.bound_s == pytest.approx(found.cost.step_s, rel=1e-6)  # proven
    if machines == 4 and model == "vgg16":
        assert [problem.options[option].devices for option in found.cut.options] == [3, 1]
