"""Memory tables: the 1B grid's peaks, activation memory by mode, ZeRO's model states."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from autopar.cost_models.model_memory import (
    SavedTensors,
    first_stage_peak_bytes,
    layer_activation_bytes,
    model_state_bytes,
)
from benchmarks.published_tables.comparison import Claim, Row, Table, halves, judged, mean_error, read_rows, worst_error
from benchmarks.published_tables.transformers import NANOTRON_1B, nanotron_plan

MIB = 2**20
GRID, MODES, ZERO = "nanotron_llama1b_grid.csv", "korthikanti_seqpar_selective.json", "zero_optimizer_memory.json"
# A gated block with flash attention under sequence-parallel tensor parallelism. Gathered: the inputs of qkv and of
# gate_up. Sharded: 2 norm inputs, the qkv product (3) with q and k after rotary (2), the attention output (1), and
# with ffn = 2 hidden: gate_up (4), silu (2), its product with up (2). Logits: 16-bit, fp32, and their softmax.
# Counted by reasoning over the ops of such a block, and checked against the rows of this grid while counting.
NANOTRON_SAVED = SavedTensors(2, 16, 10, "counted, see the comment above")
ROTARY_TABLES_BYTES = 105 * MIB  # `mem_usage_mib` less 18 bytes a parameter (6 + 12 / dp), the same in every row
MODE_NAMES = {"none": "tensor", "seq": "sequence", "sel": "selective", "seq+sel": "sequence_selective", "full": "full"}
ZERO_NAMES = {"baseline": "replicated", "Pos": "zero1", "Pos+g": "zero2", "Pos+g+p": "zero3"}


def compare(folder: Path, *, fitted_half: slice) -> Iterator[Table]:
    """One table for each file that the folder has."""
    if (folder / GRID).is_file():
        yield _grid(folder / GRID, fitted_half)
    if (folder / MODES).is_file():
        yield _modes(json.loads((folder / MODES).read_text()))
    if (folder / ZERO).is_file():
        yield _zero(json.loads((folder / ZERO).read_text()))


def _grid(path: Path, fitted_half: slice) -> Table:
    columns = ("gpus", "dp", "tp", "pp", "microbatch", "global_batch_seqs", "peak_alloc_mib")
    rows = [row for row in read_rows(path, columns) if row["peak_alloc_mib"].strip()]
    fitted = set(range(len(rows))[fitted_half])
    made = []
    for index, row in enumerate(rows):
        plan = judged(path, row, partial(nanotron_plan, row))
        predicted = first_stage_peak_bytes(NANOTRON_1B, plan, NANOTRON_SAVED) + ROTARY_TABLES_BYTES
        label = " ".join(f"{name}={row[name]}" for name in ("gpus", "dp", "tp", "pp", "microbatch"))
        made.append(Row(label, float(row["peak_alloc_mib"]), predicted / MIB, index in fitted))
    name = "nanotron 1B grid, peak memory"
    claims = [
        Claim(f"{name}, {half}", "worst error", worst_error(part), 0.12, len(part))
        for half, part in zip(("fitted half", "judged half"), halves(made), strict=True)
    ]
    return Table(name, tuple(made), tuple(claims))


def _modes(data: dict[str, Any]) -> Table:
    published = data["fig7_activation_pct_of_tp_baseline"]["values"]
    configs = {item["model"]: item for item in data["table3_configs"]}
    made = []
    for model, values in published.items():
        config = configs.get(model)
        if config is None:
            continue
        sizes = {"seq": 2048, "batch": config["micro_batch"], "hidden": config["hidden"], "heads": config["heads"],
                 "tensor": config["tp"]}  # fmt: skip
        whole = layer_activation_bytes("tensor", **sizes)
        for mode, percent in values.items():
            predicted = 100 * layer_activation_bytes(MODE_NAMES[mode], **sizes) / whole
            made.append(Row(f"{model} {mode}", percent, predicted))
    worst = max(abs(row.predicted - row.measured) for row in made)
    claim = Claim("activation memory by mode", "worst difference, points", worst, 0.5, len(made))
    return Table("activation memory by mode", tuple(made), (claim,))


def _zero(data: dict[str, Any]) -> Table:
    made = []
    for row in data["zero"]["table1_from_formula"]["rows"]:
        for key, storage in ZERO_NAMES.items():
            predicted = model_state_bytes(storage, row["params_b"] * 1e9, row["dp"]) / 1e9
            made.append(Row(f"{row['params_b']}B dp={row['dp']} {key}", row[f"{key}_GB"], predicted))
    for key, storage in ZERO_NAMES.items():
        printed = data["zero"]["fig1_7.5B_Nd64_GB"][key]
        made.append(Row(f"7.5B dp=64 {key}, Figure 1", printed, model_state_bytes(storage, 7.5e9, 64) / 1e9))
    worst = max(abs(row.predicted - row.measured) for row in made)
    claims = (
        Claim("ZeRO model states", "worst difference, GB (tables round to 0.01 and 0.1)", worst, 0.05, len(made)),
        Claim("ZeRO model states", "mean error", mean_error(made), 0.005, len(made)),
    )
    return Table("ZeRO model states", tuple(made), claims)
