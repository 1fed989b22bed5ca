"""A predicted number beside a measured one, and the summary of a table of them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from scipy.stats import spearmanr

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Row:
    """One published number and the model's; `fitted` rows were used to choose constants, the others judge them."""

    label: str
    measured: float
    predicted: float
    fitted: bool = False

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1 if self.measured else float("inf")


@dataclass(frozen=True, slots=True)
class Claim:
    """One line of the proof: a statistic of some rows against its target."""

    table: str
    statistic: str
    value: float
    target: float | None  # None: shown for comparison only
    rows: int
    at_least: bool = False  # the target is a floor (a correlation), not a ceiling

    @property
    def holds(self) -> bool:
        """Whether the value meets the target."""
        if self.target is None:
            return True
        return self.value >= self.target if self.at_least else self.value <= self.target


@dataclass(frozen=True, slots=True)
class Table:
    """All rows of one published table, with its claims."""

    name: str
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...]
    unknown: int = 0  # rows of machines or models that nothing is known of: they are not judged


class TableError(Exception):
    """A table that cannot be judged: what is wrong with it, and where."""


def read_rows(path: Path, needed: Iterable[str] = ()) -> list[dict[str, str]]:
    """The rows of a CSV file, without those marked as not seen. Raises TableError if a needed column is missing."""
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        missing = sorted(set(needed) - set(table.fieldnames or ()))
        if missing:
            raise TableError(
                f"{path}: no column {', '.join(missing)}; its columns: {', '.join(table.fieldnames or ())}"
            )
        return [row for row in table if (row.get("seen") or "true").lower() != "false"]


def judged(path: Path, row: Mapping[str, str], predict: Callable[[], _Found]) -> _Found:
    """What `predict` gives for a row. Raises TableError if a cell is not what the model reads."""
    try:
        return predict()
    except (KeyError, ValueError, ZeroDivisionError) as error:
        cells = ", ".join(f"{name}={value}" for name, value in row.items() if name not in ("source", "seen"))
        raise TableError(f"{path}: {type(error).__name__} {error} in the row {cells}") from error


def halves(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """The rows that constants were fitted on, and the rows that judge them."""
    fitted: list[Row] = []
    judged: list[Row] = []
    for row in rows:
        (fitted if row.fitted else judged).append(row)
    return fitted, judged


def quantile_error(rows: Sequence[Row], quantile: float) -> float:
    """A quantile of the absolute relative errors."""
    return float(np.quantile([abs(row.error) for row in rows], quantile)) if rows else float("nan")


def mean_error(rows: Sequence[Row]) -> float:
    """The mean of the absolute relative errors."""
    return float(np.mean([abs(row.error) for row in rows])) if rows else float("nan")


def worst_error(rows: Sequence[Row]) -> float:
    """The largest absolute relative error."""
    return max((abs(row.error) for row in rows), default=float("nan"))


def worst_factor(rows: Sequence[Row]) -> float:
    """The largest ratio between prediction and measurement, either way round."""
    return max((max(row.predicted / row.measured, row.measured / row.predicted) for row in rows), default=float("nan"))


def rank_correlation(rows: Sequence[Row]) -> float:
    """Spearman's rank correlation of predicted and measured."""
    if len(rows) < 3:
        return float("nan")
    return float(spearmanr([row.predicted for row in rows], [row.measured for row in rows]).statistic)


def number(row: Mapping[str, Any], key: str, default: float = 0.0) -> float:
    """A cell as a number; an empty cell is the default."""
    text = str(row.get(key) or "").strip()
    return float(text) if text else default
