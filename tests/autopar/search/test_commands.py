"""The commands print what a reader needs and save what a researcher needs."""

from __future__ import annotations

import argparse
import csv
import json
import time
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import make_parser
from autopar.search import Problem, Solution, commands, make_problem, solve

DATA = Path(__file__).parents[2] / "data" / "iopddl"


def run(*words: str, age_s: float = 0.0) -> int:
    """As the command line runs a command, which also gives every one of them `--json`."""
    args = make_parser([commands.add_commands]).parse_args(words, argparse.Namespace(age_s=age_s))
    status: int = args.run(args)
    return status


def test_solve_prints_cost_bound_gap_and_the_choice_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("solve", str(DATA / "example.json"), "--print-choice") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["cost     445", "bound    445", "gap      0 %", "[0, 0, 2, 1, 0]"]


def test_solve_as_json_holds_the_choice_and_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("solve", str(DATA / "example.json"), "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["cost"], answer["bound"], answer["gap"], answer["broken"]) == (445, 445, 0, [])
    assert answer["choice"] == [0, 0, 2, 1, 0]
    assert answer["trace"][-1][1:] == [445, 445]


@pytest.mark.parametrize("reading_s", [0.0, 0.3])
def test_starting_reading_and_a_reserve_for_the_end_count_against_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, reading_s: float
) -> None:
    """Of 60 seconds, 40 are gone and 2 % stay for the end; what reading took is gone, and half of it kept once more."""
    limits = []
    load = Problem.load

    def slowly(path: Path) -> Problem:
        time.sleep(reading_s)
        return load(path)

    def watched(problem: Problem, *, time_limit_s: float, **options: Any) -> Solution:
        limits.append(time_limit_s)
        return solve(problem, time_limit_s=time_limit_s, **options)

    monkeypatch.setattr(commands.Problem, "load", slowly)
    monkeypatch.setattr(commands, "solve", watched)
    assert run("solve", str(DATA / "example.json"), "--time-limit", "60", age_s=40.0) == 0
    most_s = 60.0 - 40.0 - 0.02 * 60.0 - 1.5 * reading_s
    assert most_s - 1.0 < limits[0] <= most_s


def test_solve_says_what_its_best_choice_breaks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "tight.json"
    make_problem([[0, 0]], [[9, 1]], [(0, 1)], [], [], usage_limit=5).save(path)
    assert run("solve", str(path), "--strategy", "random", "--time-limit", "0") == 1
    assert "no feasible choice found" in capsys.readouterr().out


def test_bench_search_saves_one_line_per_problem_and_strategy(tmp_path: Path) -> None:
    path = tmp_path / "records.csv"
    words = ("--strategies", "ilp,dp,greedy", "--time-limit", "2", "--csv", str(path))
    assert run("bench-search", str(DATA / "example.json"), *words) == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["strategy"] for row in rows] == ["ilp", "dp", "greedy"]
    assert float(rows[0]["cost"]) == float(rows[0]["bound"]) == 445


def test_bench_search_draws_the_incumbents_over_time(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    words = ("--strategies", "ilp,greedy", "--csv", str(tmp_path / "r.csv"), "--plot", str(plot))
    assert run("bench-search", str(DATA / "example.json"), *words) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_bench_search_as_json_holds_every_record_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--strategies", "greedy,dp", "--csv", str(tmp_path / "r.csv"), "--json")
    assert run("bench-search", str(DATA / "example.json"), *words) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    assert [record["strategy"] for record in records] == ["greedy", "dp"]
    assert records[1]["cost"] == 445
