"""Fits the constants of `transformers.Constants` again, on the even rows of each table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from published_tables.comparison import read_rows
from published_tables.transformers import RUNS, Constants

GROUPS = (
    (("megatron_ptdp_table1.csv", "mosaic_mpt_fsdp.csv"),
     ("a100_scale", "h100_scale", "megatron_passes", "mosaic_passes", "mosaic_a100_attention",
      "mosaic_h100_attention", "mosaic_float8")),
    (("torchtitan_perf.csv",),
     ("titan_passes", "titan_compiled_passes", "titan_attention", "titan_500w", "titan_float8", "titan_rowwise",
      "titan_async_overlap")),
)  # fmt: skip
PRIOR = 0.02  # keeps a constant that no row decides at its start


def fit(folder: Path, start: Constants, report: Callable[[str], None]) -> Constants:
    """The constants that minimize the mean |log error| of the even rows of each table, from `start`."""
    constants = start
    for files, names in GROUPS:
        constants = _fit_group(folder, constants, files, names)
        report("  ".join(f"{name}={getattr(constants, name):.4g}" for name in names))
    return constants


def _fit_group(folder: Path, start: Constants, files: tuple[str, ...], names: tuple[str, ...]) -> Constants:
    rows = [(runs, read_rows(folder / runs.file)[::2]) for runs in RUNS if runs.file in files]
    at_start = np.array([getattr(start, name) for name in names])

    def moved(logs: np.ndarray) -> Constants:
        return replace(start, **dict(zip(names, (at_start * np.exp(logs)).tolist(), strict=True)))

    def loss(logs: np.ndarray) -> float:
        constants, total = moved(logs), PRIOR * float(np.sum(logs**2))
        for runs, cells in rows:
            pairs = [runs.predict(row, constants) for row in cells]
            total += float(np.mean([abs(np.log(predicted / measured)) for measured, predicted in pairs]))
        return total

    simplex = np.vstack([np.zeros(len(names)), -0.2 * np.eye(len(names))])
    found = minimize(loss, simplex[0], method="Nelder-Mead", options={"maxfev": 400, "initial_simplex": simplex})
    return moved(found.x)
