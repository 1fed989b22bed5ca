"""Fits the constants again, on the even rows of each table: of each kind of link, and `transformers.Constants`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.hardware import AxisLinks
from autopar.cost_models.links import LINK_KINDS, Link
from benchmarks.published_tables import collectives
from benchmarks.published_tables.comparison import read_rows
from benchmarks.published_tables.transformers import RUNS, Constants

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


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of one system, collective and number of ranks: all their sizes at once."""

    kind: str
    axis: AxisLinks
    sizes: np.ndarray
    measured_s: np.ndarray

    @property
    def link(self) -> str:
        """The kind of link that decides."""
        return self.axis.inter.kind if self.axis.nodes > 1 else self.axis.intra.kind


def fit_links(folder: Path, report: Callable[[str], None]) -> None:
    """Report the label fraction and the hop latency of each kind of link that minimize the mean |log error|."""
    if not (folder / collectives.FILE).is_file():
        return
    groups = _groups(folder)
    for kind in sorted({group.link for group in groups}):
        mine = [group for group in groups if group.link == kind]
        fraction, latency = np.exp(_minimum(partial(_link_loss, mine)))
        known = LINK_KINDS[kind]
        report(
            f"{kind}: label fraction {known.label_fraction * fraction:.3g} (in use {known.label_fraction:g}), "
            f"hop {known.latency_s * latency * 1e6:.3g} µs (in use {known.latency_s * 1e6:g})"
        )


def _groups(folder: Path) -> list[_Group]:
    rows = [row for row in read_rows(folder / collectives.FILE) if collectives.usable(row)][::2]
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("gpu", "network", "ngpus", "nnodes", "collective"))
        found.setdefault(key, []).append(row)
    made = []
    for same in found.values():
        system = collectives.system_of(same[0])
        assert system is not None
        sizes = np.array([float(row["bytes"]) for row in same])
        seconds = np.array([float(row["time_us"]) * 1e-6 for row in same])
        kind = collectives.KINDS[same[0]["collective"]]
        made.append(_Group(kind, collectives.axis_of(same[0], system), sizes, seconds))
    return made


def _link_loss(groups: list[_Group], logs: np.ndarray) -> float:
    fraction, latency = (float(value) for value in np.exp(logs))

    def changed(link: Link) -> Link:
        return replace(link, bytes_per_s=link.bytes_per_s * fraction, latency_s=link.latency_s * latency)

    errors = []
    for group in groups:
        axis = group.axis
        inside = axis.nodes == 1
        axis = replace(axis, intra=changed(axis.intra)) if inside else replace(axis, inter=changed(axis.inter))
        predicted = collective_seconds(group.kind, group.sizes, axis)
        errors.append(np.abs(np.log(predicted / group.measured_s)))
    return float(np.mean(np.concatenate(errors))) + PRIOR * float(np.sum(logs**2))


def _minimum(loss: Callable[[np.ndarray], float]) -> np.ndarray:
    simplex = np.array([[0.0, 0.0], [0.2, 0.0], [0.0, 0.5]])
    found = minimize(loss, simplex[0], method="Nelder-Mead", options={"maxfev": 150, "initial_simplex": simplex})
    return np.asarray(found.x)
