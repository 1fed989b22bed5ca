"""The commands print what a reader needs and save what a researcher needs."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import pytest

from autopar.search import make_problem
from autopar.search.commands import add_commands

DATA = Path(__file__).parents[2] / "data" / "iopddl"


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(required=True))
    args = parser.parse_args(words)
    status: int = args.run(args)
    return status


def test_solve_prints_cost_bound_gap_and_the_choice_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("solve", str(DATA / "example.json"), "--print-choice") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == ["cost     445", "bound    445", "gap      0 %", "[0, 0, 2, 1, 0]"]


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
