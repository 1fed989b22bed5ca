"""Tables in the documents, made of measured rows: where they stand, and on what machine the rows were measured."""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from autopar.search.progress import number, percent

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Record = dict[str, Any]
"""One measured row, as it is kept in a file of JSON lines."""


def machine() -> str:
    """The processor's name and the number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def stamp() -> Record:
    """Where and when a record was measured."""
    return {"machine": machine(), "date": str(dt.date.today())}


def line(cells: Iterable[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def outcome(cost: float, bound: float) -> tuple[str, str, str]:
    """The cells of a search's cost, its bound and the gap between them; a bound of `inf` proves that nothing fits."""
    if bound == math.inf:
        return "infeasible", "-", "-"
    return number(cost), number(bound), percent(cost, bound)


def append(record: Record, results: Path) -> None:
    """Keep a record."""
    with results.open("a") as file:
        file.write(json.dumps(record) + "\n")


def latest(results: Path, key: Callable[[Record], Any]) -> list[Record]:
    """The last record of every key, by key."""
    records = map(json.loads, results.read_text().splitlines())
    last = {key(record): record for record in records}
    return [last[name] for name in sorted(last)]


def write_rows(
    page: Path,
    name: str,
    results: Path,
    cases: Sequence[str],
    titles: Sequence[str],
    cells: Callable[[Record], list[str]],
) -> None:
    """Put the last row that is kept of each case into a page, in the order of the cases."""
    rows = sorted(latest(results, lambda row: str(row["case"])), key=lambda row: cases.index(row["case"]))
    lines = [line(titles), "| --- " * len(titles) + "|", *(line(cells(row)) for row in rows)]
    write_table(page, name, ["", *lines, ""])


def table_in(page: Path, name: str) -> list[str]:
    """The lines between the marks `name: begin` and `name: end` of a page."""
    begin, end = _marks(name)
    return page.read_text(encoding="utf-8").split(begin)[1].split(end)[0].strip("\n").splitlines()


def write_table(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replace what stands between the marks `name: begin` and `name: end` of a page."""
    begin, end = _marks(name)
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text("\n".join((before + begin, *lines, end)) + rest.split(end)[1], encoding="utf-8")


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
