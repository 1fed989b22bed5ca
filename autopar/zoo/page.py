"""docs/zoo.md, written from outcomes."""

from __future__ import annotations

import datetime as dt
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from autopar.version import __version__
from autopar.zoo.checking import FAMILIES, Outcome, names_of

MARKS = {"verified": "✓", "refused": "refused", "wrong": "WRONG"}
TITLES = {
    "zoo": ("The zoo", "Two layers each, as `autopar/zoo/models.py` has them."),
    "more": (
        "Other architectures of transformers",
        "One layer or two, as `autopar/zoo/more.py` has them; those of its `IN_DOUBLE` in float64.",
    ),
    "plain": ("Plain PyTorch", "Models of kinds that people write, as `autopar/zoo/plain/` has them."),
}
INTRODUCTION = """# Which models work

Every model is captured unmodified in training mode, planned, and one step of the distributed program is compared with
the model as PyTorch runs it (or, where it draws random numbers, with the captured program on one device): every output,
gradient and buffer. ✓ says that all of them agree within the limits of `autopar.verify`: relative errors of 1e-5 for
outputs and 1e-4 for gradients in float32. An empty cell was not run. `gloo` ranks are processes of one machine; the
others run in one process. A cell is run once and kept, so cells of one table may come from different commits.

Written by `autopar zoo --family all --results FILE --page docs/zoo.md`: {date}, {machine}, torch {torch},
transformers {transformers}, autopar {version}.
"""


def write_page(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write the page of these outcomes."""
    path.write_text("\n".join(_lines(outcomes)) + "\n")


def _lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    import transformers

    yield INTRODUCTION.format(
        date=dt.date.today().isoformat(),
        machine=f"{platform.machine()} CPU, {platform.system()}",
        torch=torch.__version__,
        transformers=transformers.__version__,
        version=__version__,
    )
    for family in FAMILIES:
        own = [outcome for outcome in outcomes if outcome.architecture in names_of(family)]
        if own:
            yield from _section(family, own)
        else:
            yield from (f"## {TITLES[family][0]}", "", f"None of the {len(names_of(family))} models was run.", "")


def _section(family: str, outcomes: Sequence[Outcome]) -> Iterator[str]:
    title, text = TITLES[family]
    verified = sum(outcome.verdict == "verified" for outcome in outcomes)
    yield f"## {title}\n\n{text} {verified} of {len(outcomes)} cells verified.\n"
    columns = list(dict.fromkeys((outcome.mesh, outcome.plan) for outcome in outcomes))
    yield "| model | " + " | ".join(f"{mesh} {plan}" for mesh, plan in columns) + " |"
    yield "| --- |" + " --- |" * len(columns)
    cells = {(item.architecture, item.mesh, item.plan): MARKS[item.verdict] for item in outcomes}
    for name in dict.fromkeys(outcome.architecture for outcome in outcomes):
        yield f"| {name} | " + " | ".join(cells.get((name, *column), "") for column in columns) + " |"
    yield ""
    reasons: dict[str, list[str]] = {}
    for item in outcomes:
        if item.verdict != "verified":
            reasons.setdefault(f"{item.architecture}: {item.verdict}: {item.detail}", []).append(
                f"{item.mesh} {item.plan}"
            )
    for reason, places in reasons.items():
        yield f"- {reason.replace(chr(10), ' ')} ({', '.join(places)})"
    if reasons:
        yield ""
    missing = [name for name in names_of(family) if name not in {item.architecture for item in outcomes}]
    if missing:
        yield f"Not run: {', '.join(missing)}.\n"
