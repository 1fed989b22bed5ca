"""How long the whole planning of a pipeline takes for a 175B-parameter transformer on 1,024 devices, from its capture.

    python -m benchmarks.pipeline_planning [--case CASE ...] [--layers 96] [--write-docs]

GPT-3's sizes as in Brown et al., arXiv:2005.14165, Table 2.1: 96 layers of 12,288, 96 heads, sequences of 2,048, a
vocabulary of 50,257, a batch of 1,536 sequences (3.1M tokens), AdamW. Nothing is allocated. CPU seconds of one process,
one torch thread.
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

from benchmarks import tables

HIDDEN, SEQUENCE, VOCABULARY, LAYERS, BATCH = 12_288, 2_048, 50_257, 96, 1_536
CASES: dict[str, tuple[tuple[int, int, int], str | None, int | None]] = {
    "(8,16,8), microbatches chosen": ((8, 16, 8), "1f1b", None),
    "(8,16,8), schedule chosen too": ((8, 16, 8), None, None),
    "(8,16,8), 96 microbatches": ((8, 16, 8), "1f1b", 96),
    "(8,16,8), 48 microbatches": ((8, 16, 8), "1f1b", 48),
}
AXES = ("pp", "dp", "tp")
PAGE = tables.ROOT / "docs" / "pipelines.md"
RESULTS = tables.RESULTS / "pipeline_planning.jsonl"
TITLES = ("stages x data x tensor", "capture", "plan", "total CPU s", "peak GiB", "schedule", "step s", "GB a rank",
          "refused", "machine, date")  # fmt: skip


def make(layers: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The model on the meta device, and its batch."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=HIDDEN, n_layer=layers, n_head=96, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
        ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    return model.train(), {"input_ids": ids, "labels": ids}


def measure(case: str, layers: int) -> dict[str, Any]:
    """CPU seconds by phase, peak resident memory, and what came out."""
    from autopar.arguments import make_options
    from autopar.capture.trace import capture
    from autopar.errors import AutoparError
    from autopar.mesh import Mesh
    from autopar.planner.pipeline import plan_pipeline
    from autopar.planner.pipeline_request import PipelineRequest

    torch.set_num_threads(1)
    shape, schedule, microbatches = CASES[case]
    model, inputs = make(layers)
    options = make_options("ilp", None, torch.optim.AdamW, (), None)
    marks, found = [time.process_time()], dict[str, Any]()
    program = capture(model, (), inputs)
    marks.append(time.process_time())
    try:
        plan = plan_pipeline(
            program, Mesh(shape, AXES, hardware="h100"), options, PipelineRequest(shape[0], schedule, microbatches)
        ).plan
        assert plan.pipeline is not None
        found = {"schedule": f"{plan.pipeline.schedule}, {plan.pipeline.microbatches} microbatches",
                 "step_s": plan.step_s, "peak_bytes": plan.peak_bytes}  # fmt: skip
    except AutoparError as error:
        found = {"refused": error.what}
    marks.append(time.process_time())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"seconds": [after - before for before, after in pairwise(marks)], "peak_gib": peak, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=CASES, help=argparse.SUPPRESS)  # in this process, as JSON
    parser.add_argument("--case", choices=CASES, action="append", help="measure these alone")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--write-docs", action="store_true", help="keep the rows, and write all to the docs")
    chosen = parser.parse_args()
    if chosen.only:
        print(json.dumps(measure(chosen.only, chosen.layers)))
        return
    table = Table(*TITLES)
    for case in chosen.case or CASES:
        command = [sys.executable, "-m", "benchmarks.pipeline_planning", "--only", case, "--layers", str(chosen.layers)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tables.ROOT)
        row = {"case": case, **tables.stamp(), **json.loads(done.stdout.splitlines()[-1])}
        table.add_row(*_cells(row))
        if chosen.write_docs:
            tables.append(row, RESULTS)
    Console(width=170).print(table)
    if chosen.write_docs:
        tables.write_rows(PAGE, "pipeline planning", RESULTS, list(CASES), TITLES, _cells)


def _cells(row: dict[str, Any]) -> list[str]:
    done = "refused" not in row
    return [
        row["case"],
        *(f"{value:.1f}" for value in row["seconds"]),
        f"{sum(row['seconds']):.1f}",
        f"{row['peak_gib']:.1f}",
        row.get("schedule", ""),
        f"{row['step_s']:.2f}" if done else "",
        f"{row['peak_bytes'] / 1e9:.1f}" if done else "",
        row.get("refused", ""),
        f"{row['machine']}, {row['date']}",
    ]


if __name__ == "__main__":
    main()
