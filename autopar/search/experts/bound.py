"""Lower bounds of the slowest device's load in one layer, whatever the placement."""

from __future__ import annotations

import numpy as np

from autopar.search.experts.eplb import replica_counts
from autopar.search.experts.inputs import Array


def load_bound(load: Array, devices: int, slots: int) -> float:
    """The largest of the bounds below, all proven; `load` is [experts]."""
    mean = float(load.sum()) / devices
    counts = replica_counts(load, devices * slots)
    hottest = float((load / counts).max())
    bounds = [mean, hottest]
    if devices * slots == len(load):
        bounds.append(pigeonhole_bound(load, devices, slots))
    return max(bounds)


def pigeonhole_bound(load: Array, devices: int, slots: int) -> float:
    """Without spare slots: of the k * devices + 1 largest loads, some device has k + 1, beside its smallest others."""
    ordered = np.sort(load)[::-1]
    smallest = np.concatenate([[0.0], np.cumsum(ordered[::-1])])
    bounds = [0.0]
    for k in range(slots):
        last = k * devices + 1
        bounds.append(float(ordered[last - k - 1 : last].sum() + smallest[slots - k - 1]))
    return max(bounds)
