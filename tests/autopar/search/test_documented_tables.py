"""The tables of docs/search.md are what the kept records render to, and nothing else."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import iopddl, perturbed
from benchmarks.tables import append, latest, outcome, write_table


@pytest.mark.parametrize(("name", "lines"), [("iopddl", iopddl.table()), ("perturbed", perturbed.table())])
def test_a_table_holds_the_latest_records(name: str, lines: list[str], tmp_path: Path) -> None:
    page = tmp_path / "search.md"
    page.write_text(iopddl.DOCS.read_text())
    write_table(page, name, lines)
    assert page.read_text() == iopddl.DOCS.read_text()


def test_only_what_stands_between_the_marks_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a: begin -->\nold\n<!-- a: end -->\nafter\n")
    write_table(page, "a", ["new"])
    assert page.read_text() == "before\n<!-- a: begin -->\nnew\n<!-- a: end -->\nafter\n"


def test_the_last_record_of_a_key_counts(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    for name, cost in (("B", 1), ("A", 2), ("B", 3)):
        append({"name": name, "cost": cost}, results)
    assert [record["cost"] for record in latest(results, lambda record: record["name"])] == [2, 3]


def test_an_infinite_bound_is_no_gap_of_zero() -> None:
    assert outcome(math.inf, math.inf) == ("infeasible", "-", "-")
    assert outcome(math.inf, -math.inf) == ("-", "-", "-")
    assert outcome(4.0, 3.0) == ("4", "3", "25.00 %")
