"""Seconds and memory of planning, by phase: GPT-2 small on (4, 2), an 8B Llama on (32, 8), both without weights.

    python benchmarks/planning.py [--write-docs]

CPU seconds of one process (children none), one torch thread. The peer's figures are of a public planner of the same
kind on one core of this class, in CPU seconds, as the project's issue states them: they are not measured here.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

CASES = {
    "gpt2-small (4,2)": ("gpt2", (4, 2), "132 plan, 13 apply"),
    "llama-8b (32,8)": ("llama", (32, 8), "137 plan"),
}
PHASES = ("capture", "decisions", "problem", "search", "emit")
DOCS = Path(__file__).parent.parent / "docs" / "planning_speed.md"


def make(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model on the meta device and its global batch."""
    import transformers

    with torch.device("meta"):
        if name == "gpt2":
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))
            ids = torch.zeros(64, 1024, dtype=torch.long)
        else:
            config = transformers.LlamaConfig(
                vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
                num_attention_heads=32, num_key_value_heads=8, use_cache=False,
            )  # fmt: skip
            model = transformers.LlamaForCausalLM(config)
            ids = torch.zeros(256, 4096, dtype=torch.long)
    return model.train(), {"input_ids": ids, "labels": ids}


def measure(case: str) -> dict[str, Any]:
    """CPU seconds by phase, peak resident memory, and what came out."""
    from autopar.capture.trace import capture
    from autopar.mesh import Mesh
    from autopar.passes.pipeline import emit
    from autopar.planner.build import build_problem
    from autopar.planner.decisions import NO_OPTIMIZER, DecisionList
    from autopar.planner.node_prices import origin_geometry
    from autopar.planner.prices import Prices
    from autopar.search import solve

    torch.set_num_threads(1)
    name, shape, _ = CASES[case]
    model, inputs = make(name)
    marks = [time.process_time()]
    program = capture(model, (), inputs)
    marks.append(time.process_time())
    prices = Prices(Mesh(shape, hardware="h100"))
    decisions = DecisionList(program, prices, NO_OPTIMIZER).build()
    marks.append(time.process_time())
    planning = build_problem(program, decisions, prices, usage_limit=prices.device.memory_bytes * 0.92)
    marks.append(time.process_time())
    solution = solve(planning.problem, time_limit_s=30)
    marks.append(time.process_time())
    emit(program, planning.assignment(solution.choice), origin_geometry(shape))
    marks.append(time.process_time())
    return {
        "nodes": len(program.graph_module.graph.nodes),
        "seconds": [after - before for before, after in pairwise(marks)],
        "gap": solution.gap,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--write-docs", action="store_true")
    chosen = parser.parse_args()
    if chosen.case:
        print(json.dumps(measure(chosen.case)))
        return
    rows = {case: _in_own_process(case) for case in CASES}
    table = Table("model and mesh", "nodes", *PHASES, "total CPU s", "peak GiB", "gap", "public peer, CPU s")
    lines = []
    for case, row in rows.items():
        cells = [case, str(row["nodes"]), *(f"{value:.1f}" for value in row["seconds"])]
        cells += [f"{sum(row['seconds']):.1f}", f"{row['peak_gib']:.1f}", f"{row['gap']:.2%}", CASES[case][2]]
        table.add_row(*cells)
        lines.append("| " + " | ".join(cells) + " |")
    Console(width=160).print(table)
    if chosen.write_docs:
        head = "| " + " | ".join(str(column.header) for column in table.columns) + " |"
        rule = "| " + " | ".join("---" for _ in table.columns) + " |"
        machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
        text = f"# Planning speed\n\nBy `benchmarks/planning.py`, {date.today()}, one core of a shared {machine}.\n\n"
        rest = "".join(DOCS.read_text(encoding="utf-8").partition("\n## ")[1:])  # sections of other benchmarks
        DOCS.write_text(text + "\n".join([head, rule, *lines]) + "\n" + rest, encoding="utf-8")


def _in_own_process(case: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, "--case", case], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
