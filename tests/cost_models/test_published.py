"""The proof: cost models agree with published measurements to the promised tolerance, on rows that did not fit them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import published
from benchmarks.tables import table_in


@pytest.fixture(scope="module")
def tables() -> list[Any]:
    made: list[Any] = published.every_table(published.SHIPPED, fitted_half=slice(0, None, 2))
    return made


@pytest.mark.slow
def test_every_table_meets_its_target_on_both_halves(tables: list[Any]) -> None:
    claims = [claim for table in tables for claim in table.claims]
    assert not [claim for claim in claims if not claim.holds]
    assert len(claims) >= 25


def test_a_folder_without_tables_gives_none_and_the_rest_is_passed_over(tmp_path: Path) -> None:
    assert published.every_table(tmp_path, fitted_half=slice(0)) == []
    name = "nanotron_llama1b_grid.csv"
    (tmp_path / name).write_text((published.SHIPPED / name).read_text())
    found = published.every_table(tmp_path, fitted_half=slice(0))
    assert [table.name for table in found] == ["nanotron 1B grid, time", "nanotron 1B grid, peak memory"]
    assert all(claim.holds for table in found for claim in table.claims if claim.rows)


def changed_table(folder: Path, name: str, change: Callable[[list[str]], list[str]]) -> None:
    lines = (published.SHIPPED / name).read_text().splitlines()
    (folder / name).write_text("\n".join(change(lines)) + "\n")


def test_rows_of_machines_and_models_that_nobody_knows_are_counted_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "torchtitan_perf.csv"
    changed_table(tmp_path, name, lambda lines: [*lines[:4], lines[4].replace("H100", "TPU v9")])
    assert published.main(["--data", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "torchtitan: 1 rows of unknown machines" in printed
    assert "| torchtitan, judged half | 3 |" in printed


@pytest.mark.parametrize(
    ("name", "column"),
    [("torchtitan_perf.csv", "local_batch"), ("nccl_bandwidth.csv", "time_us"), ("zero_bubble.csv", "T_W_ms"),
     ("nanotron_llama1b_grid.csv", "global_batch_seqs"), ("mosaic_mpt_fsdp.csv", "grad_accum")],
)  # fmt: skip
def test_a_missing_column_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, column: str) -> None:
    changed_table(tmp_path, name, lambda lines: [lines[0].replace(column, "other"), *lines[1:3]])
    assert published.main(["--data", str(tmp_path)]) == 2
    assert f"{name}: no column {column}" in capsys.readouterr().err


def test_a_cell_that_cannot_be_read_and_a_folder_without_tables_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert published.main(["--data", str(tmp_path)]) == 2
    assert "none of the tables" in capsys.readouterr().err
    name = "nanotron_llama1b_grid.csv"
    changed_table(tmp_path, name, lambda lines: [lines[0], lines[1].replace("llama-1B,16,", "llama-1B,16,x")])
    assert published.main(["--data", str(tmp_path)]) == 2
    assert "in the row" in capsys.readouterr().err


@pytest.mark.slow
def test_the_docs_hold_the_table_that_the_script_prints(tables: list[Any]) -> None:
    assert table_in(published.DOCS, "published") == published.claim_lines(tables)
