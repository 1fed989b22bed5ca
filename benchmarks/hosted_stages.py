"""Pipelines under limits at which parameters have to live on the host: what is promised and measured, what it costs.

    python -m benchmarks.hosted_stages [--model gpt2] [--hardware a100] [--write-docs]

Two stages with AdamW and four microbatches, all ranks in this process: without a limit, then at shares of what that
needs. Under each the step is run and compared with the model on one device (`autopar.verify`). The optimizer's state
counts in the limit, and is left out of what is measured and of the promise beside it: no step of it is run.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import autopar
from autopar.errors import MemoryLimitError
from autopar.report.figures import bytes_text, kinds_text
from autopar.zoo.models import make
from benchmarks.tables import ROOT, line, write_table

DOCS = ROOT / "docs" / "memory.md"
SCHEDULES = {"gpipe": 2, "1f1b": 2, "zb-h1": 2, "interleaved": 4}  # stages
SHARES = (1.0, 0.8, 0.6, 0.4, 0.3)
COLUMNS = ("schedule", "limit", "planned", "promised", "measured", "on the host", "overhead", "on the host, recomputed")
REFUSED = "refused: nothing fits"


@dataclass(frozen=True)
class Run:
    """What came of one limit; `promised` and `measured` without the optimizer's state."""

    schedule: str
    share: float
    planned: int = 0
    promised: int = 0
    measured: int = 0
    host: str = ""
    overhead: float = 0.0
    changes: str = REFUSED
    is_right: bool = True

    @property
    def is_kept(self) -> bool:
        return self.measured <= self.promised <= 1.1 * self.measured and self.is_right

    @property
    def row(self) -> str:
        sizes = [bytes_text(size) if size else "" for size in (self.planned, self.promised, self.measured)]
        slower = f"{self.overhead:.1%}" if self.planned else ""
        return line([self.schedule, f"{self.share:.0%}", *sizes, self.host, slower, self.changes])


class WithLoss(nn.Module):
    """A model and a loss of its first output, so that microbatches go back as soon as they are through."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        first = next(item for item in tree_leaves(self.model(*args, **kwargs)) if isinstance(item, Tensor))
        return first.float().square().mean()


def runs(name: str, hardware: str, schedule: str) -> Iterator[Run]:
    """One per limit, the widest first."""
    torch.manual_seed(0)
    model, inputs = make(name)
    model = WithLoss(model)
    mesh = autopar.Mesh((2,), ("pp",), hardware=hardware)
    asked: dict[str, Any] = {"stages": SCHEDULES[schedule], "schedule": schedule, "microbatches": 4}
    given = {"example_inputs": inputs, "optimizer": torch.optim.AdamW, **asked}
    roomy = autopar.make_plan(model, mesh, **given)
    for share in SHARES:
        limit = int(share * roomy.peak_bytes)
        try:
            plan = autopar.make_plan(model, mesh, memory_limit_bytes=limit, **given)
        except MemoryLimitError:
            yield Run(schedule, share)
            continue
        assert plan.peak_bytes <= limit
        report = autopar.verify(model, mesh, example_inputs=inputs, plan=plan)
        alone = autopar.make_plan(model, mesh, example_inputs=inputs, plan=plan)  # the same without an optimizer
        assert report.peak_bytes is not None
        hosted, again = (
            sum(entry.kind == kind and entry.residency == word for entry in plan.every_entry)
            for kind, word in (("parameter", "offload"), ("op", "recompute"))
        )
        host = kinds_text(plan.host_memory) if plan.host_bytes else "-"
        yield Run(
            schedule, share, plan.peak_bytes, alone.peak_bytes, report.peak_bytes, host,
            plan.step_s / roomy.step_s - 1, f"{hosted}, {again}", report.ok,
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--hardware", default="a100")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args()
    found: list[Run] = []
    head = [line(COLUMNS), line(["---"] * len(COLUMNS))]
    print("\n".join(head))
    for schedule in SCHEDULES:
        for it in runs(options.model, options.hardware, schedule):
            found.append(it)
            print(it.row, flush=True)
    broken = sum(not it.is_kept for it in found if it.planned)
    print(f"{broken} promises broken")
    if options.write_docs:
        place = f"{platform.machine()}, {platform.system()}, torch {torch.__version__}, {date.today()}"
        text = f"{options.model} with a loss, {place}, profile {options.hardware}; {broken} promises broken:"
        write_table(DOCS, "hosted_stages", [text, "", *head, *(it.row for it in found), ""])
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
