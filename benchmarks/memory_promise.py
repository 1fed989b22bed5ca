"""The promise about memory, measured: small models of many kinds, five budgets each, all ranks in this process.

    python benchmarks/memory_promise.py [--only gpt2 vit] [--mesh 2] [--search ilp] [--hardware cpu]
        [--optimizer AdamW] [--write-docs]

For each model: the plan without a limit, the least memory that any plan was found to need, and three limits in between.
Under each the step is run and compared with the model on one device (`autopar.verify`), and the most bytes alive on any
rank are measured and divided into what the plan promised: below 1 breaks the promise, above 1.1 is too careful. The
state of an optimizer that is given counts in the limit, and is left out of both numbers: no step of it is run. With
`--write-docs` the rows of each model replace its own in docs/memory.md as soon as they are there.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch

import autopar
from autopar.errors import MemoryLimitError
from autopar.plan_entries import PlanEntry
from autopar.zoo.models import make
from benchmarks.tables import ROOT, table_in, write_table

MODELS = ("gpt2", "llama", "mistral", "bert", "t5", "vit", "gpt_neox", "opt", "bloom", "distilbert", "roberta", "mamba")
BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)
DOCS = ROOT / "docs" / "memory.md"
HEAD = (
    "| model | budget | limit | promised | measured | promised / measured | overhead | not kept | right |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


@dataclass(frozen=True)
class Kept:
    """What came of one budget."""

    model: str
    budget: float
    limit: int
    promised: int
    measured: int
    overhead: float
    not_kept: str
    is_right: bool

    @property
    def is_kept(self) -> bool:
        return self.measured <= self.promised <= min(self.limit, 1.1 * self.measured) and self.is_right

    @property
    def row(self) -> str:
        return (
            f"| {self.model} | {self.budget:.0%} | {self.limit} | {self.promised} | {self.measured} "
            f"| {self.promised / self.measured:.3f} | {self.overhead:.1%} | {self.not_kept} | {self.is_right} |"
        )


def promises(
    name: str, mesh_shape: tuple[int, ...], search: str, hardware: str, optimizer: str | None
) -> Iterator[Kept]:
    """One per budget, from all that the fastest plan wants to the least that was found."""
    torch.manual_seed(0)
    model, inputs = make(name)
    mesh = autopar.Mesh(mesh_shape, hardware=hardware)
    given: dict[str, Any] = {"example_inputs": inputs, "search": search}
    given["optimizer"] = None if optimizer is None else getattr(torch.optim, optimizer)
    roomy = autopar.make_plan(model, mesh, **given)
    try:
        autopar.make_plan(model, mesh, memory_limit_bytes=1, **given)
    except MemoryLimitError as refused:
        least = int(refused.fix.split("memory_limit_bytes=")[1].split()[0])
    for budget in BUDGETS:
        limit = int(least + budget * max(0, roomy.peak_bytes - least))
        plan = autopar.make_plan(model, mesh, memory_limit_bytes=limit, **given)
        report = autopar.verify(model, mesh, example_inputs=inputs, plan=plan)
        assert report.peak_bytes is not None
        words = Counter(_word(entry) for entry in plan.entries if entry.residency not in ("", "keep"))
        not_kept = ", ".join(f"{count} {word}" for word, count in sorted(words.items())) or "-"
        overhead = plan.step_s / roomy.step_s - 1
        promised = plan.peak_bytes - plan.memory.get("optimizer_state", 0)
        yield Kept(name, budget, limit, promised, report.peak_bytes, overhead, not_kept, report.ok)


def _word(entry: PlanEntry) -> str:
    return f"{entry.residency} (parameter)" if entry.kind == "parameter" else entry.residency


def write_docs(fresh: Sequence[Kept], hardware: str, optimizer: str | None) -> None:
    """Put the rows of a model into a table of the page, in place of its own if there are any."""
    name = "memory_promise" if optimizer is None else "hosted"
    table = table_in(DOCS, name)
    rows = [line for line in table if line.startswith("| ") and not line.startswith(f"| {fresh[0].model} |")]
    rows = [line for line in rows if not line.startswith(("| model", "| ---"))] + [kept.row for kept in fresh]
    machine = (
        f"{platform.machine()}, {platform.system()}, torch {torch.__version__}, {date.today()}, profile {hardware}"
    )
    write_table(DOCS, name, [f"{machine}:", "", HEAD, *rows, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    parser.add_argument("--mesh", type=int, nargs="+", default=[2])
    parser.add_argument("--search", default="ilp")
    parser.add_argument("--hardware", default="cpu")
    parser.add_argument("--optimizer", default=None, help="of torch.optim")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args()
    broken = 0
    print(HEAD)
    for name in options.only:
        found: list[Kept] = []
        for it in promises(name, tuple(options.mesh), options.search, options.hardware, options.optimizer):
            broken += not it.is_kept
            found.append(it)
            print(it.row, flush=True)
            if options.write_docs:
                write_docs(found, options.hardware, options.optimizer)
    print(f"{broken} promises broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
