"""Cost models against published measurements: prints every table's error beside its target.

    python -m benchmarks.published [--data DIR] [--rows] [--fit] [--write-docs]

`--data` is any folder with files of the same names and columns as `benchmarks/data` (files that are not there are
passed over). Without it the shipped tables are used: "fitted half" is their even rows, "judged half" the odd
ones; docs/cost_models.md says which constants that split really holds for. With `--data` every row judges.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.published_tables import collectives, fitting, memory, pipelines, transformers
from benchmarks.published_tables.comparison import Claim, Table, TableError
from benchmarks.tables import ROOT, write_table

SHIPPED = Path(__file__).parent / "data"
DOCS = ROOT / "docs" / "cost_models.md"
FILES = ", ".join(sorted(path.name for path in SHIPPED.iterdir() if path.suffix in (".csv", ".json")))


def every_table(folder: Path, *, fitted_half: slice) -> list[Table]:
    """All tables that the folder has."""
    made: list[Table] = []
    if (folder / collectives.FILE).is_file():
        made.append(collectives.compare(folder / collectives.FILE, fitted_half=fitted_half))
    made += transformers.compare(folder, transformers.Constants(), fitted_half=fitted_half)
    made += memory.compare(folder, fitted_half=fitted_half)
    made += pipelines.compare(folder)
    return made


def claim_lines(tables: Sequence[Table]) -> list[str]:
    """The claims as a Markdown table."""
    lines = ["| table | rows | what | error | target | |", "| --- | --- | --- | --- | --- | --- |"]
    return lines + [_claim_line(claim) for table in tables for claim in table.claims if claim.rows]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; 0 if every claim holds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="a folder with the published tables (default: the shipped ones)")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--fit", action="store_true", help="fit the constants again, on even rows, and print them")
    parser.add_argument("--write-docs", action="store_true", help="refresh the table in docs/cost_models.md")
    options = parser.parse_args(arguments)
    if options.fit:
        fitting.fit_links(options.data or SHIPPED, print)
        fitting.fit(options.data or SHIPPED, transformers.Constants(), print)
        return 0
    try:
        tables = every_table(options.data or SHIPPED, fitted_half=slice(0) if options.data else slice(0, None, 2))
    except TableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not tables:
        print(f"error: {options.data} has none of the tables of {SHIPPED.name}: {FILES}", file=sys.stderr)
        return 2
    for table in tables:
        if table.unknown:
            print(f"{table.name}: {table.unknown} rows of unknown machines, models or ops are left out")
    for table in tables if options.rows else ():
        print(f"\n{table.name}")
        for row in table.rows:
            print(f"  {row.label:<78} {row.measured:>12.5g} {row.predicted:>12.5g} {100 * row.error:>+7.1f} %")
    print("\n".join(claim_lines(tables)))
    if options.write_docs:
        write_table(DOCS, "published", claim_lines(tables))
    return 0 if all(claim.holds for table in tables for claim in table.claims if claim.rows) else 1


def _claim_line(claim: Claim) -> str:
    sign, holds = ("≥" if claim.at_least else "≤"), ("holds" if claim.holds else "**missed**")
    target, holds = ("-", "for comparison") if claim.target is None else (f"{sign} {claim.target:g}", holds)
    cells = (claim.table, str(claim.rows), claim.statistic, f"{claim.value:.4g}", target, holds)
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
