"""Seconds and memory of planning, by phase, for whole models without weights: what `make_plan` does, search and all.

    python -m benchmarks.planning [--case CASE ...] [--write-docs]

CPU seconds of one process, one torch thread; `emit`: one rank's program emitted once more, for comparison. `others`:
the least cost that any other strategy finds for the layouts, everything kept and without a memory limit, over that of
`ilp`; `hand`: the fastest hand plan as foreseen, over the
plan. The peer is a public planner of the same kind on one core of this class, in CPU seconds as the project's issue
states them: not measured here.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from autopar.errors import TooWideError
from autopar.search import FORBIDDEN, Problem, solve
from benchmarks import tables

CASES = {
    "gpt2-small (4,2)": ("gpt2", (4, 2), 5, "132 plan, 13 apply"),
    "llama-8b (32,8)": ("llama-8b", (32, 8), 15, "137 plan"),
    "llama-70b (16,8)": ("llama-70b", (16, 8), 25, "280 plan, on (32,8)"),
    "llama-405b (256,8)": ("llama-405b", (256, 8), 45, ""),
    "u-net (4,2)": ("unet", (4, 2), None, ""),
    "vit-large (8,4)": ("vit", (8, 4), None, ""),
    "mixtral, 8 layers (8,4)": ("mixtral", (8, 4), None, ""),
}
PHASES = ("capture", "plan", "emit")
PAGE = tables.ROOT / "docs" / "planning_speed.md"
RESULTS = tables.RESULTS / "planning.jsonl"
TIMEOUT_S = 900  # of a case, wall clock
OTHERS = ("dp", "greedy", "local", "anneal", "beam", "random")
LLAMAS = {  # layers, hidden, intermediate, heads, sequences
    "llama-8b": (32, 4096, 14_336, 32, 256),
    "llama-70b": (80, 8192, 28_672, 64, 128),
    "llama-405b": (126, 16_384, 53_248, 128, 2048),
}


def make(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model on the meta device and its global batch."""
    import transformers

    with torch.device("meta"):
        if name in LLAMAS:
            layers, hidden, intermediate, heads, sequences = LLAMAS[name]
            config: Any = transformers.LlamaConfig(
                vocab_size=128_256, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=8, use_cache=False,
            )  # fmt: skip
            return _language(transformers.LlamaForCausalLM(config), sequences, 4096)
        if name == "mixtral":
            config = transformers.MixtralConfig(num_hidden_layers=8, use_cache=False)
            return _language(transformers.MixtralForCausalLM(config), 64, 2048)
        if name == "vit":
            config = transformers.ViTConfig(
                hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=1000
            )
            model = transformers.ViTForImageClassification(config)
            return model.train(), {"pixel_values": torch.zeros(256, 3, 224, 224), "labels": torch.zeros(256).long()}
        if name == "unet":
            return UNet().train(), {"images": torch.zeros(64, 3, 256, 256)}
        if name == "gpt2":
            return _language(transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False)), 64, 1024)
    raise ValueError(f"no model {name!r}")


def _language(model: torch.nn.Module, sequences: int, length: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    ids = torch.zeros(sequences, length, dtype=torch.long, device="meta")
    return model.train(), {"input_ids": ids, "labels": ids}


class UNet(torch.nn.Module):
    """Four levels with skip connections, after Ronneberger et al., MICCAI 2015; the loss is a mean square."""

    def __init__(self, width: int = 64, levels: int = 4) -> None:
        super().__init__()
        sizes = [3, *(width * 2**level for level in range(levels))]
        self.down = torch.nn.ModuleList(_block(a, b) for a, b in pairwise(sizes))
        self.up = torch.nn.ModuleList(
            torch.nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(list(pairwise(sizes[1:])))
        )
        self.merge = torch.nn.ModuleList(_block(2 * a, a) for a in reversed(sizes[1:-1]))
        self.head = torch.nn.Conv2d(width, 3, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x, skips = images, []
        for number, block in enumerate(self.down):
            x = block(torch.nn.functional.max_pool2d(x, 2) if number else x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips[:-1]), strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        return (self.head(x) - images).square().mean()


def _block(inputs: int, outputs: int) -> torch.nn.Module:
    steps = []
    for width in (inputs, outputs):
        steps += [torch.nn.Conv2d(width, outputs, 3, padding=1), torch.nn.BatchNorm2d(outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*steps)


def measure(case: str) -> dict[str, Any]:
    """CPU seconds by phase, peak resident memory, and what came out."""
    from autopar.capture.trace import capture
    from autopar.mesh import Mesh
    from autopar.passes.pipeline import emit
    from autopar.planner.bounds import without_limit
    from autopar.planner.make import Options, plan_program
    from autopar.planner.node_prices import origin_geometry
    from autopar.planner.optimizers import optimizer_of

    torch.set_num_threads(1)
    name, shape, *_ = CASES[case]
    model, inputs = make(name)
    marks = [time.process_time()]
    program = capture(model, (), inputs)
    marks.append(time.process_time())
    planned = plan_program(program, Mesh(shape, hardware="h100"), Options(optimizer=optimizer_of(torch.optim.AdamW)))
    marks.append(time.process_time())
    emit(program, planned.assignment, origin_geometry(shape))
    marks.append(time.process_time())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    layouts = without_limit(planned.planning.problem)
    costs = [_cost(layouts, other) for other in OTHERS]
    ours = solve(layouts, time_limit_s=10).cost
    hands = [
        seconds for key, seconds in planned.plan.alternatives.items() if key in ("ddp", "zero2", "fsdp", "megatron")
    ]
    return {
        "nodes": len(program.graph_module.graph.nodes),
        "seconds": [after - before for before, after in pairwise(marks)],
        "gap": planned.plan.gap,
        "peak_gib": peak,
        "step_s": planned.plan.step_s,
        "others": min([cost for cost in costs if cost < FORBIDDEN], default=float("nan")) / ours,
        "hand": min(hands, default=float("nan")) / planned.plan.step_s,
    }


def _cost(problem: Problem, strategy: str) -> float:
    """What another strategy finds in ten seconds; not a number where the problem is not of its kind."""
    try:
        return solve(problem, strategy=strategy, time_limit_s=10).cost
    except TooWideError:
        return float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=CASES, help=argparse.SUPPRESS)  # in this process, as JSON
    parser.add_argument("--case", choices=CASES, action="append", help="measure these alone")
    parser.add_argument(
        "--write-docs", action="store_true", help="keep the rows, and write all that are kept to the docs"
    )
    chosen = parser.parse_args()
    if chosen.only:
        print(json.dumps(measure(chosen.only)))
        return
    titles = (
        "model and mesh",
        "nodes",
        *PHASES,
        "capture to plan, CPU s",
        "asked",
        "peak GiB",
        "gap",
        "step ms",
        "others",
        "hand",
    )
    titles = *titles, "public peer, CPU s", "date"
    table = Table(*titles)
    for case in chosen.case or CASES:
        row = {"case": case, **tables.stamp(), **_in_own_process(case)}
        table.add_row(*_cells(row))
        if chosen.write_docs:
            tables.append(row, RESULTS)
    Console(width=170).print(table)
    if chosen.write_docs:
        tables.write_rows(PAGE, "cases", RESULTS, list(CASES), titles, _cells)


def _cells(row: dict[str, Any]) -> list[str]:
    _, _, asked, peer = CASES[row["case"]]
    if "failed" in row:
        return [
            row["case"],
            f"{row['failed']}",
            *[""] * len(PHASES),
            "",
            str(asked or ""),
            *[""] * 5,
            peer,
            row["date"],
        ]
    cells = [row["case"], str(row["nodes"]), *(f"{value:.1f}" for value in row["seconds"])]
    cells += [f"{sum(row['seconds'][:2]):.1f}", str(asked or ""), f"{row['peak_gib']:.1f}", f"{row['gap']:.2%}"]
    return [*cells, f"{1e3 * row['step_s']:.1f}", f"{row['others']:.3f}", f"{row['hand']:.3f}", peer, row["date"]]


def _in_own_process(case: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.planning", "--only", case]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=tables.ROOT)
    except subprocess.TimeoutExpired:
        return {"failed": f"stopped after {TIMEOUT_S} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        said = [text.partition("Error: ")[2] for text in lines if text.startswith("autopar.errors.")]
        return {"failed": (said or lines)[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
