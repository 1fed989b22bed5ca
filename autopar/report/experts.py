"""The load of experts and of the devices that hold them, where they are and where they might be: a table, a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.table import Table

from autopar.errors import ExpertPlacementError
from autopar.plots import new_figure
from autopar.report.figures import rendered

Loads = npt.NDArray[np.float64]
Devices = Sequence[Sequence[int]]  # by device, the experts in its slots


@dataclass(frozen=True)
class ExpertReport:
    """One layer's load by expert, and by device under each of some placements (`before`, `after`, ...).

    An expert in several slots shares its load among them equally.
    """

    layer: str
    load: Sequence[float]  # by expert
    placements: Mapping[str, Devices]

    def __post_init__(self) -> None:
        experts = range(len(self.load))
        for name, devices in self.placements.items():
            placed = {int(expert) for slots in devices for expert in slots}
            if placed != set(experts):
                wrong = sorted(placed ^ set(experts))
                raise ExpertPlacementError(
                    f"{self.layer}: the placement {name!r} and the load disagree about experts {wrong}",
                    fix="give each expert of the layer at least one slot, and no other",
                )

    @cached_property
    def device_load(self) -> Mapping[str, Loads]:
        """By placement, float64 [devices]."""
        return {name: self._loads(devices) for name, devices in self.placements.items()}

    def _loads(self, devices: Devices) -> Loads:
        replicas = np.zeros(len(self.load))
        for slots in devices:
            np.add.at(replicas, np.asarray(slots, dtype=np.int64), 1)
        share = np.asarray(self.load, dtype=np.float64) / replicas
        return np.array([share[np.asarray(slots, dtype=np.int64)].sum() for slots in devices])

    @property
    def imbalance(self) -> Mapping[str, float]:
        """By placement, the slowest device's load over the mean; 1 without any load."""
        return {
            name: float(loads.max() / loads.mean()) if loads.any() else 1.0 for name, loads in self.device_load.items()
        }

    def __str__(self) -> str:
        names = list(self.placements)
        table = Table(box=SIMPLE_HEAD, pad_edge=False, title=self.layer, title_justify="left")
        for column in ("device", *(text for name in names for text in (f"experts {name}", f"load {name}"))):
            table.add_column(column, justify="right" if column.startswith("load") else "left", overflow="fold")
        for device in range(max(map(len, self.placements.values()), default=0)):
            cells = (cell for name in names for cell in self._cells(name, device))
            table.add_row(str(device), *cells)
        worst = (cell for name in names for cell in ("slowest over mean", f"{self.imbalance[name]:.3f}"))
        table.add_row("", *worst)
        return rendered(table)

    def _cells(self, name: str, device: int) -> tuple[str, str]:
        devices = self.placements[name]
        if device >= len(devices):
            return "", ""
        return " ".join(map(str, devices[device])), f"{self.device_load[name][device]:,.0f}"

    def plot(self) -> Any:
        """A figure: bars of the load by expert, and by device under each placement, with the mean."""
        figure = new_figure(4.0 * (1 + len(self.placements)), 3.0)
        axes = figure.subplots(1, 1 + len(self.placements), squeeze=False)[0]
        self._bars(axes[0], np.asarray(self.load, dtype=np.float64), "expert", self.layer)
        for axis, (name, loads) in zip(axes[1:], self.device_load.items(), strict=True):
            self._bars(axis, loads, "device", f"{name}: {self.imbalance[name]:.3f}")
        return figure

    @staticmethod
    def _bars(axis: Any, loads: Loads, label: str, title: str) -> None:
        axis.bar(range(len(loads)), loads)
        axis.axhline(loads.mean(), linestyle="--", linewidth=1, color="black")
        axis.set(xlabel=label, ylabel="tokens", title=title)
