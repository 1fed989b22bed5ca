"""The stage ILP is exact: brute force agrees; and it is never worse than cutting evenly."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleProblemError, ProblemFormatError
from autopar.search.stage_ilp import solve_cut
from autopar.search.stage_problem import (
    Cut,
    CutCost,
    StageOption,
    StageProblem,
    best_even_cut,
    crossing,
    evaluate_cut,
    infeasible,
)

whole = st.integers(0, 9).map(float)


@st.composite
def problems(draw: st.DrawFn, layers: int = 5) -> StageProblem:
    """Layers of any times, on up to two kinds of devices, with memory that may bind."""
    count = draw(st.integers(1, layers))

    def table(numbers: st.SearchStrategy[float] = whole) -> npt.NDArray[np.float64]:
        return np.array(draw(st.lists(numbers, min_size=count, max_size=count)))

    kinds = draw(st.sampled_from([["gpu"], ["gpu", "old"]]))
    options = tuple(
        StageOption(f"{kind}{devices}", kind, devices, draw(st.sampled_from([30.0, 60.0, 1e9])), table(), table(),
                    table(), table(st.sampled_from([0.0, 2.0])), draw(st.sampled_from([1.0, 4.0])), 0.5)
        for kind in kinds for devices in (1, 2)
    )  # fmt: skip
    counts = tuple((kind, draw(st.integers(1, 4))) for kind in kinds)
    in_flight = draw(st.sampled_from(["all", "remaining", "stages", "twice the stages"]))
    return StageProblem(crossing(list(table())), options, counts, draw(st.sampled_from([1, 2, 8])), in_flight,
                        draw(st.booleans()), draw(st.sampled_from([0, 0, 2])),
                        draw(st.sampled_from([False, False, True])))  # fmt: skip


def brute_force(problem: StageProblem) -> tuple[Cut, CutCost]:
    """The best of all cuts, by trying them."""
    best: tuple[Cut, CutCost] | None = None
    for inner in itertools.product((False, True), repeat=problem.layers - 1):
        ends = (*(place + 1 for place, cut in enumerate(inner) if cut), problem.layers)
        for options in itertools.product(range(len(problem.options)), repeat=len(ends)):
            cut = Cut(ends, options)
            cost = evaluate_cut(problem, cut)
            if not cost.violations and (best is None or cost.step_s < best[1].step_s):
                best = cut, cost
    if best is None:
        raise infeasible(problem)
    return best


@settings(max_examples=60)
@given(problems())
def test_the_ilp_finds_what_brute_force_finds(problem: StageProblem) -> None:
    try:
        _, expected = brute_force(problem)
    except InfeasibleProblemError:
        with pytest.raises(InfeasibleProblemError):
            solve_cut(problem)
        return
    found = solve_cut(problem)
    assert found.cost == evaluate_cut(problem, found.cut)
    assert not found.cost.violations
    assert found.cost.step_s == pytest.approx(expected.step_s, rel=1e-5, abs=1e-9)
    assert found.bound_s <= expected.step_s * (1 + 1e-9)


@settings(max_examples=25)
@given(problems(layers=14))
def test_a_cut_is_never_worse_than_an_even_one(problem: StageProblem) -> None:
    even = best_even_cut(problem)
    if even is not None:
        assert solve_cut(problem).cost.step_s <= even[1].step_s


def alike(layers: int, **changed: float) -> StageOption:
    numbers = {"work_s": 1.0, "fixed_bytes": 1.0, "activation_bytes": 1.0, "sync_s": 0.0} | changed
    tables = {name: np.full(layers, value) for name, value in numbers.items() if name != "memory_bytes"}
    return StageOption("one", "gpu", 1, changed.get("memory_bytes", 1e9), **tables)


def test_a_slow_device_gets_fewer_layers() -> None:
    fast, slow = alike(12), alike(12, work_s=2.0)
    slow = StageOption("old", "old", 1, 1e9, slow.work_s, slow.fixed_bytes, slow.activation_bytes, slow.sync_s)
    problem = StageProblem(np.zeros(12), (fast, slow), (("gpu", 1), ("old", 1)), 32)
    found = solve_cut(problem)
    sizes = {problem.options[option].kind: end - first for first, end, option in found.cut.spans()}
    assert sizes == {"gpu": 8, "old": 4}


def test_where_stages_lie_is_given_the_slow_device_keeps_its_place() -> None:
    one = alike(12)
    options = tuple(
        StageOption(kind, kind, 1, 1e9, one.work_s * seconds, one.fixed_bytes, one.activation_bytes, one.sync_s)
        for kind, seconds in (("rank 0", 1.0), ("rank 1", 2.0), ("rank 2", 1.0))
    )
    counts = tuple((option.kind, 1) for option in options)
    found = solve_cut(StageProblem(np.zeros(12), options, counts, 32, stages=3, in_order=True))
    assert [end - first for first, end, _ in found.cut.spans()] == [5, 2, 5]
    assert [options[number].kind for number in found.cut.options] == [kind for kind, _ in counts]


def test_the_first_stage_of_1f1b_gets_fewer_layers_where_memory_binds() -> None:
    """It holds as many microbatches as there are stages: 1 + 2 bytes for each of its layers, the last 1 + 1."""
    problem = StageProblem(np.zeros(10), (alike(10, memory_bytes=15),), (("gpu", 2),), 8)
    assert solve_cut(problem).cut.ends == (5, 10)
    tight = StageProblem(np.zeros(10), (alike(10, memory_bytes=13),), (("gpu", 2),), 8)
    assert solve_cut(tight).cut.ends == (4, 10)


def test_a_cut_goes_where_little_is_read_later() -> None:
    passing = crossing([9, 9, 1, 9, 9, 0], readers=[(0, 5)])
    assert passing.tolist() == [9, 18, 10, 18, 18, 0]
    option = alike(6)
    narrow = StageOption("one", "gpu", 1, 1e9, option.work_s, option.fixed_bytes, option.activation_bytes,
                         option.sync_s, send_bytes_per_s=2.0)  # fmt: skip
    found = solve_cut(StageProblem(crossing([9, 9, 1, 9, 9, 0]), (narrow,), (("gpu", 2),), 16))
    assert found.cut.ends == (3, 6)


def test_what_fits_nowhere_and_what_is_no_problem_are_refused() -> None:
    with pytest.raises(InfeasibleProblemError, match="no cut of 4 layers into stages fits the memory of 2 gpu"):
        solve_cut(StageProblem(np.zeros(4), (alike(4, memory_bytes=2),), (("gpu", 2),), 4))
    with pytest.raises(ProblemFormatError, match="a number in every table"):
        StageProblem(np.zeros(3), (alike(4),), (("gpu", 2),), 4)
    cost = evaluate_cut(StageProblem(np.zeros(4), (alike(4),), (("gpu", 1),), 4), Cut((2, 3), (0, 0)))
    assert cost.violations == ("the stages do not cover the layers", "2 devices of 1 of kind gpu")
