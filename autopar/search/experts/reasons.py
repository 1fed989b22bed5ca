"""Why an expert stands where it does, in plain words: what its layer would be with it elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from autopar.errors import ExpertPlacementError

if TYPE_CHECKING:
    from autopar.search.experts.placement import Placement


def why_there(placement: Placement, layer: int, expert: int) -> str:
    """The devices of an expert, their loads, and the best that one exchange with another expert would make of them.

    Raises ExpertPlacementError where there is no such layer or expert.
    """
    layers, experts = placement.load.shape
    if not (0 <= layer < layers and 0 <= expert < experts):
        raise ExpertPlacementError(
            f"there is no expert {expert} of layer {layer}",
            fix=f"the placement has {layers} layers of {experts} experts, counted from 0",
        )
    slots, load = placement.assignment[layer], placement.load[layer]
    total, devices = float(load.sum()), np.flatnonzero((slots == expert).any(1))
    loads, slowest = placement.device_load[layer], float(placement.device_load[layer].max())
    where = ", ".join(f"{device} (load {loads[device]:.4g})" for device in devices)
    share = f"{load[expert] / total:.1%} of the layer's load" if total else "no load"
    lines = [
        f"expert {expert} of layer {layer}: {share}, on device {where}",
        f"the slowest device has {slowest:.4g}, {placement.imbalance[layer]:.4g} of the mean; no placement is below "
        f"{placement.bound[layer]:.4g}",
        _exchanged(placement, layer, expert, slowest),
    ]
    return "\n".join(line for line in lines if line)


def _exchanged(placement: Placement, layer: int, expert: int, slowest: float) -> str:
    """The best exchange of one of its slots for another expert's on another device, by the slowest device then."""
    slots, replicas = placement.assignment[layer], placement.replicas[layer]
    share = placement.load[layer] / np.maximum(1, replicas)
    best: tuple[float, int, int] | None = None
    for home in np.flatnonzero((slots == expert).any(1)):
        for device, row in enumerate(slots):
            if device == home or expert in row:
                continue
            for other in row:
                if other in slots[home]:
                    continue
                after = placement.device_load[layer].copy()
                after[home] += share[other] - share[expert]
                after[device] += share[expert] - share[other]
                found = float(after.max()), device, int(other)
                best = found if best is None else min(best, found)
    if best is None:
        return ""
    worst, device, other = best
    verdict = f"{worst - slowest:.4g} more" if worst > slowest else "no less" if worst == slowest else "less"
    why = "" if worst >= slowest else ": it was left for the traffic, the moves, or the time that the search had"
    return f"on device {device} in exchange for expert {other}, the best of all exchanges, it would have {verdict}{why}"
