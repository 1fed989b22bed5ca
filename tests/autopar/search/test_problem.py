"""The exchange format: what is read is what was written, and what is wrong is named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from autopar.errors import ProblemFormatError
from autopar.search import FORBIDDEN, Problem, evaluate, make_problem, violations
from tests.autopar.search.problems import every_choice, problems

DATA = Path(__file__).parents[2] / "data" / "iopddl"


@given(problem=problems(max_nodes=3, classes=3))
@settings(max_examples=40)
@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_saving_and_loading_keeps_every_cost(
    problem: Problem, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("problems") / name
    problem.save(path)
    again = Problem.load(path)
    assert (again.groups, again.usage_limit, again.edges) == (problem.groups, problem.usage_limit, problem.edges)
    for choice in every_choice(problem):
        assert evaluate(again, choice) == evaluate(problem, choice)


def test_the_contest_file_is_read_whole() -> None:
    problem = Problem.load(DATA / "asplos-2025-iopddl-B.json.gz")
    assert len(problem.costs) == 816
    assert len(problem.edges) == 1096
    assert sum(len(costs) for costs in problem.costs) == 10_188


def example() -> dict[str, Any]:
    body: dict[str, Any] = json.loads((DATA / "example.json").read_text())
    return body


def loaded(body: dict[str, Any], tmp_path: Path) -> Problem:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(body))
    return Problem.load(path)


@pytest.mark.parametrize(
    ("section", "key", "index", "value", "message"),
    [
        ("nodes", "costs", 1, [55], "node 1"),
        ("nodes", "costs", 2, ["a"], "node 2 costs"),
        ("nodes", "usages", 1, [25, -1], "node 1"),
        ("edges", "nodes", 3, [1, 1], "edge 3"),
        ("edges", "nodes", 3, [1, 9], "edge 3"),
        ("edges", "costs", 4, [1, 2, 3], "edge 4"),
    ],
)
def test_a_broken_file_names_what_and_where(
    section: str, key: str, index: int, value: Any, message: str, tmp_path: Path
) -> None:
    body = example()
    body["problem"][section][key][index] = value
    with pytest.raises(ProblemFormatError, match=message):
        loaded(body, tmp_path)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    body = example()
    del body["problem"]["nodes"]["usages"]
    with pytest.raises(ProblemFormatError, match="usages"):
        loaded(body, tmp_path)


def test_a_file_that_is_not_there_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ProblemFormatError, match="cannot be read"):
        Problem.load(tmp_path / "none.json")


def test_classes_of_unequal_sizes_are_refused() -> None:
    with pytest.raises(ProblemFormatError, match="class 0"):
        make_problem([[1, 2], [1]], [[0, 0], [0]], [(0, 0), (0, 0)], [], [], groups=[0, 0])


def test_violations_say_which_rule_breaks() -> None:
    problem = make_problem(
        [[1, FORBIDDEN], [1, 1]],
        [[5, 0], [6, 6]],
        [(0, 4), (2, 9)],
        [(0, 1)],
        [[0, FORBIDDEN, 0, 0]],
        usage_limit=10,
        groups=[0, 0],
    )
    assert [text.split(":")[0] for text in violations(problem, (0, 1))] == ["edge 0", "node 1", "time 2"]
    assert [text.split(":")[0] for text in violations(problem, (1, 1))] == ["node 0"]
    assert violations(problem, (0,)) == ("1 choices for 2 nodes",)
    assert violations(problem, (0, 7)) == ("node 1: strategy 7 of 2",)
    assert evaluate(problem, (0, 0)) == math.inf


def test_costs_sum_exactly() -> None:
    problem = Problem(
        (np.array([1e15]), np.array([0.25]), np.array([-1e15])), (np.zeros(1),) * 3, ((0, 0),) * 3, (), ()
    )
    assert evaluate(problem, (0, 0, 0)) == 0.25
