"""Recomputation against memory: autopar, PyTorch's activation memory budget, and checkpointing of every layer.

    python -m benchmarks.memory_frontier [others] [growth] [optimum] [--only vgg19] [--seconds 60] [--write-docs]

`others`: all choose what to recompute on the same joint graph of one device; each choice is emitted by the same passes,
its peak is that of the emitted program, and its overhead is priced by the same cost model. autopar is given the peak
that the other reached, as its limit. Models are planned at full size without weights; no step is run.

`growth`: whether three times the batch, or the depth, fits in what the model needs when all is kept, and its overhead:
recomputing alone, and with values on the host or compressed without loss.

`optimum`: the step as autopar recomputes in it over what no schedule of recomputation can be faster than
(`recompute_optimum.py`), at four limits between the least memory that was found and what is needed with all kept.
"""

from __future__ import annotations

import argparse
import copy
import math
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import torch

from autopar.api import make_plan
from autopar.capture.program import InputKind, OutputKind, Program
from autopar.capture.trace import capture
from autopar.errors import MemoryLimitError, MicrobatchError
from autopar.mesh import Mesh
from autopar.passes.packings import EXACT
from autopar.planner.budget import Budget
from autopar.planner.build import PlanningProblem
from autopar.planner.fit import Fit, Fitted
from autopar.planner.make import Options, plan_program
from autopar.planner.measure import predicted_step_s
from autopar.planner.packed_values import Packing
from autopar.planner.prices import Prices
from autopar.planner.residency import USUAL, Residency
from autopar.planner.saved_values import late_decisions, roots_of
from benchmarks.frontier_models import MODELS
from benchmarks.recompute_optimum import least_bytes, proven_optimum
from benchmarks.tables import ROOT, write_table

TABLES = ("others", "growth", "optimum")
OTHERS = ("vgg19", "resnet50", "unet", "mobilenet", "gpt2", "llama")  # models, as below
PUBLISHED = {"mobilenet": 1.06, "vgg16": 1.01, "vgg19": 1.00, "unet": 1.03, "resnet50": 1.05}
"""Of Checkmate's two-phase rounding: step over optimum, geometric mean (Jain et al., MLSys 2020, table 2)."""
BUDGETS = (0.75, 0.5, 0.25, 0.0)
TIMES = 3  # the batch or the depth that grows
PARTS = (3, 4, 6)  # microbatches of the grown batch
DOCS = ROOT / "docs" / "memory_frontier.md"


@dataclass(frozen=True)
class Case:
    """One model on one device: its program, its only choice of layouts, and what recomputation there is to choose."""

    name: str
    program: Program
    planning: PlanningProblem
    fit: Fit
    everything: Fitted  # kept
    step_s: float

    @classmethod
    def of(cls, name: str, *, times: int = 1, depth: int = 1, hardware: str = "a100-80") -> Case:
        """`times` the usual batch of a model of `depth` times the layers."""
        make, batch = MODELS[name]
        with torch.device("meta"):
            model, inputs = make(times * batch, depth)
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
        program = capture(model.train(), args, kwargs)
        mesh = Mesh((1,), hardware=hardware)
        planned = plan_program(program, mesh, Options(search="ddp", memory_limit_bytes=10**15))
        prices = Prices(mesh)
        packing = Packing(planned.planning.decisions, prices, ())
        fit = Fit(planned.planning, planned.choice, prices, planned.plan.step_s, {}, Budget(60), packing)
        step_s = predicted_step_s(planned.planning, planned.choice, prices)
        return cls(name, program, planned.planning, fit, fit.measured(USUAL), step_s)

    def fit_with(self, words: tuple[str, ...]) -> Fit:
        """The choice of what is recomputed, with residencies beside keep and recompute."""
        return replace(self.fit, packing=Packing(self.planning.decisions, self.fit.prices, words), budget=Budget(60))

    def decisions_of(self, names: set[str]) -> frozenset[int]:
        """The ops of the forward among nodes of the program."""
        late = late_decisions(self.planning.decisions)
        decisions = enumerate(self.planning.decisions)
        return frozenset(i for i, item in decisions if item.node in names and item.kind == "op" and not late[i])


def by_pytorch(case: Case, budget: float) -> Residency:
    """What PyTorch's min-cut partitioner recomputes on the same joint graph under an activation memory budget."""
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    gm = copy.deepcopy(case.program.graph_module)
    tangents = {item.node for item in case.program.inputs if item.kind is InputKind.TANGENT}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            node.target = f"tangents_{node.name}" if node.name in tangents else f"primals_{node.name}"
    results = sum(output.kind is not OutputKind.GRADIENT for output in case.program.outputs)
    with config.patch(activation_memory_budget=budget, cse=False):
        _, backward = min_cut_rematerialization_partition(gm, None, num_fwd_outputs=results)
    names = {node.name for node in backward.graph.nodes if node.op == "call_function"}
    return Residency(case.fit.saved.closed(case.decisions_of(names)))


def by_layer(case: Case) -> Residency:
    """Checkpointing of every layer: of a repeated or top module, only what other modules read is kept."""
    return _by_segment(case, [_layer_of(decision.module) for decision in case.planning.decisions])


def by_root(case: Case) -> Residency:
    """Checkpointing of as many segments as the root of the number of layers (Chen et al., arXiv:1604.06174)."""
    layers = [_layer_of(decision.module) for decision in case.planning.decisions]
    order = {layer: number for number, layer in enumerate(dict.fromkeys(layers))}
    length = math.ceil(math.sqrt(len(order)))
    return _by_segment(case, [order[layer] // length for layer in layers])


def _by_segment(case: Case, segments: Sequence[object]) -> Residency:
    """Only what is read in another segment than the one it is made in is kept. `segments`: by decision."""
    decisions = case.planning.decisions
    late, roots = late_decisions(decisions), roots_of(decisions)
    crossing = {
        roots[source.decision]
        for index, decision in enumerate(decisions)
        for source in decision.sources
        if not late[index] and segments[index] != segments[roots[source.decision]]
    }
    values = case.fit.saved.values
    return Residency(case.fit.saved.closed({index for index in values if index not in crossing}))


def _layer_of(module: str) -> str:
    match = re.match(r"(.*?\d+)(\.|$)", module)
    return match[1] if match else module.partition(".")[0]


def others(name: str) -> Iterator[str]:
    """One row per choice of the others: ours at most its overhead, at most its peak."""
    case = Case.of(name)
    choices = [(f"budget {budget:g}", by_pytorch(case, budget)) for budget in BUDGETS]
    for other, recomputed in [*choices, ("per layer", by_layer(case)), ("root of layers", by_root(case))]:
        found = case.fit.measured(recomputed)
        peak = found.measured.peak_bytes
        of_all = peak / case.everything.measured.peak_bytes
        shares = f"{of_all:.1%} | {found.seconds / case.step_s:.2%} | {_under(case, peak)}"
        yield f"| {name} | {other} | {peak / 1e9:.3f} | {shares} |"


def _under(case: Case, limit: int) -> str:
    """The overhead under a limit, or the least that is needed."""
    found, thriftiest = case.fit.under(limit, case.everything)
    if found is None:
        thriftiest = case.fit.thriftiest(case.everything)
        found = thriftiest if thriftiest.measured.peak_bytes <= limit else None
    if found is None:
        return f"needs {thriftiest.measured.peak_bytes / 1e9:.3f} GB"
    return f"{found.seconds / case.step_s:.2%}"


def growth(name: str) -> Iterator[str]:
    """Whether three times the batch, and the depth, fits in what the model needs when all is kept."""
    limit = Case.of(name).everything.measured.peak_bytes
    for grown, case in (("batch", Case.of(name, times=TIMES)), ("depth", Case.of(name, depth=TIMES))):
        cells = [_under(replace(case, fit=case.fit_with(words)), limit) for words in ((), EXACT)]
        needs = case.everything.measured.peak_bytes
        least = least_bytes(case.fit, case.everything)
        sizes = f"{limit / 1e9:.3f} | {needs / 1e9:.3f} | {least / 1e9:.3f}"
        cells.append(_in_parts(name, limit, case.step_s) if grown == "batch" else "")
        yield f"| {name} | {grown} | {sizes} | {' | '.join(cells)} |"


def _in_parts(name: str, limit: int, step_s: float) -> str:
    """The least overhead under the limit when the grown batch is run in microbatches, or why it is not."""
    make, batch = MODELS[name]
    with torch.device("meta"):
        model, inputs = make(TIMES * batch, 1)
    mesh, found = Mesh((1,), ("pp",), hardware="a100-80"), list[tuple[float, int]]()
    options: dict[str, Any] = {"schedule": "1f1b", "search": "ddp", "memory_limit_bytes": limit}
    given = inputs if isinstance(inputs, dict) else (inputs,)
    for count in PARTS:
        try:
            plan = make_plan(model.train(), mesh, example_inputs=given, microbatches=count, **options)
        except MicrobatchError:
            return "statistics of the batch"
        except MemoryLimitError:
            continue
        found.append((plan.step_s / step_s - 1, count))
    return f"{min(found)[0]:.2%} in {min(found)[1]}" if found else "does not fit"


def optimum(name: str, seconds: float) -> Iterator[str]:
    """The step of autopar over the least that is proven, at each limit; then the geometric mean."""
    case = Case.of(name, hardware="v100")
    least, kept = case.fit.thriftiest(case.everything), case.everything
    low, high = least.measured.peak_bytes, kept.measured.peak_bytes
    ratios = []
    for budget in BUDGETS:
        limit = int(low + budget * (high - low))
        found, _ = case.fit.under(limit, kept)
        ours = min((item for item in (found, least) if item is not None), key=lambda item: item.seconds)
        proven = proven_optimum(case.fit, (kept, ours), limit, seconds)
        ratios.append((case.step_s + ours.seconds) / (case.step_s + proven.bound))
        shares = f"{ours.seconds / case.step_s:.2%} | {proven.bound / case.step_s:.2%} | {ratios[-1]:.4f}"
        yield f"| {name} | {budget:.0%} | {limit / 1e9:.3f} | {shares} | |"
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    yield f"| {name} | geometric mean | | | | {mean:.4f} | {PUBLISHED[name]:.2f} |"


HEADS = {
    "others": ("model", "other", "peak, GB", "of the peak with all kept", "overhead of the other", "of autopar"),
    "growth": (
        "model",
        "three times",
        "limit, GB",
        "all kept, GB",
        "at least, GB",
        "recomputing",
        "packing too",
        "in parts",
    ),
    "optimum": ("model", "budget", "limit, GB", "overhead", "proven least", "step / least", "Checkmate's rounding"),
}


def rows_of(table: str, names: Sequence[str], seconds: float) -> Iterator[str]:
    """The lines of a table of Markdown."""
    yield f"| {' | '.join(HEADS[table])} |"
    yield f"|{' --- |' * len(HEADS[table])}"
    for name in names:
        if table == "optimum" and name in PUBLISHED:
            yield from optimum(name, seconds)
        elif table != "optimum" and name in OTHERS:
            yield from others(name) if table == "others" else growth(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=list(TABLES), choices=TABLES)
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seconds", type=float, default=60.0, help="for each proof of an optimum")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args()
    for table in options.tables:
        lines = []
        for line in rows_of(table, options.only, options.seconds):
            lines.append(line)
            print(line, flush=True)
        if options.write_docs:
            write_docs(table, lines)
    return 0


def write_docs(table: str, lines: list[str]) -> None:
    """Write one table into its place on the page, with machine and date."""
    where = f"{platform.machine()}, {platform.system()}, torch {torch.__version__}, {date.today()}:"
    write_table(DOCS, table, [where, "", *lines, ""])


if __name__ == "__main__":
    sys.exit(main())
