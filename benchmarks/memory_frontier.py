"""Recomputation against memory: autopar, PyTorch's activation memory budget, and checkpointing of every layer.

    python benchmarks/memory_frontier.py [--only vgg19] [--growth] [--write-docs]

All three choose what to recompute on the same joint graph of one device; each choice is emitted by the same passes, its
peak is that of the emitted program, and its overhead is priced by the same cost model. autopar is given the peak that
the other reached, as its limit. Models are planned at full size without weights; no step is run.

`--growth`: whether three times the batch fits in what a batch needs when all is kept, and its overhead: recomputing
alone, and with values on the host or compressed without loss. `--growth-only`: nothing else.
"""

from __future__ import annotations

import argparse
import copy
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.program import InputKind, OutputKind, Program
from autopar.capture.trace import capture
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
from autopar.planner.saved_values import late_decisions

BUDGETS = (0.75, 0.5, 0.25, 0.0)
DOCS = Path(__file__).parent.parent / "docs" / "memory_frontier.md"
Made = tuple[nn.Module, Any]


def vgg19(batch: int) -> Made:
    layers: list[nn.Module] = []
    width = 3
    for out, count in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(count):
            layers += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU()]
            width = out
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, *head), torch.empty(batch, 3, 224, 224, device="meta")


class Bottleneck(nn.Module):
    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        plain = width == out and stride == 1
        down = [nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out)]
        self.shortcut = nn.Identity() if plain else nn.Sequential(*down)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet50(batch: int) -> Made:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    width = 64
    for inner, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for place in range(count):
            layers.append(Bottleneck(width, inner, stride if place == 0 else 1))
            width = 4 * inner
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))
    return model, torch.empty(batch, 3, 224, 224, device="meta")


def mobilenet(batch: int) -> Made:
    """The depthwise separable layers of MobileNet v1."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    width = 32
    for out, stride in (
        (64, 1),
        (128, 2),
        (128, 1),
        (256, 2),
        (256, 1),
        (512, 2),
        *[(512, 1)] * 5,
        (1024, 2),
        (1024, 1),
    ):
        layers += [nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
        width = out
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))
    return model, torch.empty(batch, 3, 224, 224, device="meta")


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        self.down = nn.ModuleList(self._double(a, b) for a, b in zip((3, *widths[:-1]), widths, strict=True))
        self.middle = self._double(widths[-1], 2 * widths[-1])
        ups = tuple(reversed(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, 2) for width in ups)
        self.merge = nn.ModuleList(self._double(2 * width, width) for width in ups)
        self.head = nn.Conv2d(widths[0], 2, 1)

    @staticmethod
    def _double(width: int, out: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(width, out, 3, padding=1), nn.ReLU(), nn.Conv2d(out, out, 3, padding=1), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


def unet(batch: int) -> Made:
    return UNet(), torch.empty(batch, 3, 416, 608, device="meta")


def gpt2(batch: int) -> Made:
    import transformers

    model = transformers.GPT2Model(transformers.GPT2Config(use_cache=False, n_layer=6))
    return model, {"input_ids": torch.zeros(batch, 512, dtype=torch.long, device="meta")}


def llama(batch: int) -> Made:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16,
        num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaModel(config), {"input_ids": torch.zeros(batch, 512, dtype=torch.long, device="meta")}


MODELS: dict[str, tuple[Callable[[int], Made], int]] = {
    "vgg19": (vgg19, 32),
    "resnet50": (resnet50, 32),
    "unet": (unet, 8),
    "mobilenet": (mobilenet, 64),
    "gpt2": (gpt2, 8),
    "llama": (llama, 8),
}


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
    def of(cls, name: str, batch: int | None = None) -> Case:
        make, usual = MODELS[name]
        with torch.device("meta"):
            model, inputs = make(batch or usual)
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
        program = capture(model.train(), args, kwargs)
        mesh = Mesh((1,), hardware="a100-80")
        planned = plan_program(program, mesh, Options(search="ddp", memory_limit_bytes=10**15))
        prices = Prices(mesh)
        packing = Packing(planned.planning.decisions, prices, ())
        fit = Fit(planned.planning, planned.choice, prices, planned.plan.step_s, {}, Budget(30), packing)
        step_s = predicted_step_s(planned.planning, planned.choice, prices)
        return cls(name, program, planned.planning, fit, fit.measured(USUAL), step_s)

    def fit_with(self, words: tuple[str, ...]) -> Fit:
        """The choice of what is recomputed, with residencies beside keep and recompute."""
        return replace(self.fit, packing=Packing(self.planning.decisions, self.fit.prices, words), budget=Budget(30))

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
    decisions = case.planning.decisions
    layers = [_layer_of(decision.module) for decision in decisions]
    late = late_decisions(decisions)
    crossing = {
        source.decision
        for index, decision in enumerate(decisions)
        for source in decision.sources
        if not late[index] and layers[index] != layers[source.decision]
    }
    values = case.fit.saved.values
    return Residency(case.fit.saved.closed({index for index in values if index not in crossing}))


def _layer_of(module: str) -> str:
    match = re.match(r"(.*?\d+)(\.|$)", module)
    return match[1] if match else module.partition(".")[0]


@dataclass(frozen=True)
class Row:
    model: str
    other: str
    peak: int
    of_all: float
    overhead: float
    ours: float | None
    seconds: float


def rows_of(case: Case) -> Iterator[Row]:
    """One row per choice of the others."""
    others = [(f"budget {budget:g}", by_pytorch(case, budget)) for budget in BUDGETS] + [("per layer", by_layer(case))]
    for name, recomputed in others:
        other = case.fit.measured(recomputed)
        started = time.perf_counter()
        ours, _ = case.fit.under(other.measured.peak_bytes, case.everything)
        spent = time.perf_counter() - started
        peak = other.measured.peak_bytes
        yield Row(
            case.name, name, peak, peak / case.everything.measured.peak_bytes, other.seconds / case.step_s,
            None if ours is None else ours.seconds / case.step_s, spent,
        )  # fmt: skip


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| model | other | peak | of the peak when all is kept | overhead of the other | of autopar |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        ours = "none found" if row.ours is None else f"{row.ours:.2%}"
        lines.append(
            f"| {row.model} | {row.other} | {row.peak / 1e9:.3f} GB | {row.of_all:.1%} | {row.overhead:.2%} | {ours} |"
        )
    return "\n".join(lines)


def growth(name: str) -> str:
    """Whether three times the batch fits in what the smaller one needs when all is kept, and at what overhead."""
    batch = MODELS[name][1]
    limit = Case.of(name, batch).everything.measured.peak_bytes
    large = Case.of(name, 3 * batch)
    cells = [_overhead(replace(large, fit=large.fit_with(words)), limit) for words in ((), EXACT)]
    needs = large.everything.measured.peak_bytes
    return f"| {name} | {batch} -> {3 * batch} | {limit / 1e9:.3f} | {needs / 1e9:.3f} | {' | '.join(cells)} |"


def _overhead(case: Case, limit: int) -> str:
    found, thriftiest = case.fit.under(limit, case.everything)
    if found is None:
        return f"least {thriftiest.measured.peak_bytes / 1e9:.3f} GB"
    return f"{found.seconds / case.step_s:.1%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--growth-only", action="store_true")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.only if not options.growth_only else ():
        case = Case.of(name)
        for row in rows_of(case):
            rows.append(row)
            print(table([row]).splitlines()[-1], f"{row.seconds:.1f} s", flush=True)
    grown = [growth(name) for name in options.only] if options.growth or options.growth_only else []
    print("\n".join(grown))
    if options.write_docs:
        write_docs(rows, grown)
    return 0


def write_docs(rows: list[Row], grown: list[str]) -> None:
    """Write the page, with machine and date."""
    head = (
        "| model | batch | limit, GB | needed with all kept, GB | recomputing | packing too |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    text = (
        "# Memory and recomputation\n\nWritten by `benchmarks/memory_frontier.py`: see there for what is compared. "
        f"Torch {torch.__version__}, {platform.machine()}, {date.today()}; prices of the profile `a100-80`.\n\n"
        f"{table(rows)}\n\nThree times the batch under the peak of the smaller one:\n\n{head}\n"
        + "\n".join(grown)
        + "\n"
    )
    DOCS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
