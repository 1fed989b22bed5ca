"""Loads and brute force for the tests of expert placement."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# The example of github.com/deepseek-ai/EPLB (README): two layers of 12 experts, 16 replicas in 4 groups on 2 nodes of 8
# GPUs, and the load of each GPU under the placement that it prints.
EPLB_LOAD = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
EPLB_DEVICE_LOAD = [
    [121.5, 86.5, 125.0, 113.0, 147.5, 131.5, 156.0, 152.0],
    [173.0, 179.5, 120.5, 172.0, 123.0, 152.0, 118.5, 117.5],
]
EPLB_IMBALANCE = [1.2081, 1.2422]

# Tokens of the 16 experts of one rank in one layer of a DeepSeek model (sgl-project/sglang, pull request 5524).
REAL_LOAD = [
    162554, 147879, 102827, 108924, 46123, 505540, 98864, 184719,
    322237, 128708, 117722, 118096, 73528, 245469, 119943, 69937,
]  # fmt: skip


def zipf_load(experts: int, exponent: float, seed: int, tokens: float = 1e6) -> Array:
    """float64 [experts], whole numbers, in random order."""
    random = np.random.default_rng(seed)
    load = np.arange(1, experts + 1) ** -exponent * np.exp(0.3 * random.standard_normal(experts))
    random.shuffle(load)
    whole: Array = np.round(load / load.sum() * tokens)
    return whole


def all_placements(experts: int, devices: int, slots: int) -> Iterator[Array]:
    """Every [devices, slots] in which each expert has a slot."""
    rows = list(itertools.combinations_with_replacement(range(experts), slots))
    for chosen in itertools.product(rows, repeat=devices):
        placement = np.array(chosen)
        if len(np.unique(placement)) == experts:
            yield placement


def slowest_by_loops(load: Array, placement: Array) -> float:
    """The load of the slowest device, replica by replica."""
    count = {expert: int((placement == expert).sum()) for expert in range(len(load))}
    return max(sum(float(load[expert]) / count[expert] for expert in row) for row in placement.tolist())
