"""The promise about memory, measured: small models of many kinds, five budgets each, all ranks in this process.

    python benchmarks/memory_promise.py [--only gpt2 vit] [--mesh 2] [--search ilp]

For each model: the plan without a limit, the least memory that any plan was found to need, and three limits in between.
Under each the step is run and compared with the model on one device (`autopar.verify`), and the most bytes alive on any
rank are measured and divided into what the plan promised: below 1 breaks the promise, above 1.1 is too careful.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import autopar
from autopar.errors import MemoryLimitError
from autopar.zoo.models import make

MODELS = ("gpt2", "llama", "mistral", "bert", "t5", "vit", "gpt_neox", "opt", "bloom", "distilbert", "roberta", "mamba")
BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)


@dataclass(frozen=True)
class Kept:
    """What came of one budget."""

    model: str
    budget: float
    limit: int
    promised: int
    measured: int
    overhead: float
    recomputed: int
    is_right: bool

    @property
    def is_kept(self) -> bool:
        return self.measured <= self.promised <= min(self.limit, 1.1 * self.measured) and self.is_right


def promises(name: str, mesh_shape: tuple[int, ...], search: str) -> Iterator[Kept]:
    """One per budget, from all that the fastest plan wants to the least that was found."""
    torch.manual_seed(0)
    model, inputs = make(name)
    mesh = autopar.Mesh(mesh_shape, hardware="cpu")
    given: dict[str, Any] = {"example_inputs": inputs, "search": search}
    roomy = autopar.make_plan(model, mesh, **given)
    try:
        autopar.make_plan(model, mesh, memory_limit_bytes=1, **given)
    except MemoryLimitError as refused:
        least = int(refused.fix.split("memory_limit_bytes=")[1].split()[0])
    for budget in BUDGETS:
        limit = int(least + budget * max(0, roomy.peak_bytes - least))
        plan = autopar.make_plan(model, mesh, memory_limit_bytes=limit, **given)
        run = autopar.run_virtual(model, mesh, example_inputs=inputs, plan=plan)
        report = autopar.verify(model, mesh, example_inputs=inputs, plan=plan)
        recomputed = sum(entry.residency == "recompute" for entry in plan.entries)
        overhead = plan.step_s / roomy.step_s - 1
        yield Kept(name, budget, limit, plan.peak_bytes, max(run.peak_bytes), overhead, recomputed, report.ok)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    parser.add_argument("--mesh", type=int, nargs="+", default=[2])
    parser.add_argument("--search", default="ilp")
    options = parser.parse_args()
    broken = 0
    print("| model | budget | limit | promised | measured | promised / measured | overhead | recomputed | right |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in options.only:
        for it in promises(name, tuple(options.mesh), options.search):
            broken += not it.is_kept
            print(
                f"| {it.model} | {it.budget:.0%} | {it.limit} | {it.promised} | {it.measured} "
                f"| {it.promised / it.measured:.3f} | {it.overhead:.1%} | {it.recomputed} | {it.is_right} |",
                flush=True,
            )
    print(f"{broken} promises broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
