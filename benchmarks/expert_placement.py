"""Expert placement against the heuristic of EPLB: `python -m benchmarks.expert_placement > docs/experts.md`.

Prints the page: imbalance on the published example, on Zipf and on real loads; time for a large model; what
re-placement moves; tokens that cross nodes with affinity and without, by simulation.
"""

from __future__ import annotations

import datetime as dt
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import ortools

from autopar.search import Placement, place_experts
from autopar.search.experts.balance import slowest
from autopar.search.experts.eplb import global_placement, hierarchical_placement
from benchmarks.clustered_routing import clustered_routing, nodes_crossed, round_robin

Array = npt.NDArray[Any]

# The example of github.com/deepseek-ai/EPLB (README).
EPLB_EXAMPLE = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
# 16 of the 256 experts of one layer of a DeepSeek model: a comment in sgl-project/sglang, pull request 5524.
REAL_LOAD = [
    162554, 147879, 102827, 108924, 46123, 505540, 98864, 184719,
    322237, 128708, 117722, 118096, 73528, 245469, 119943, 69937,
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """Loads [layers, experts] and where their experts are to stand."""

    name: str
    load: Array
    devices: int
    replicas: int


def zipf(layers: int, experts: int, exponent: float, seed: int) -> Array:
    """float64 [layers, experts]: Zipf with log-normal noise, whole numbers, in an order of each layer's own."""
    random = np.random.default_rng(seed)
    rows = np.arange(1, experts + 1) ** -exponent * np.exp(0.3 * random.standard_normal((layers, experts)))
    rows = random.permuted(rows, axis=1)
    whole: Array = np.round(rows / rows.sum(1, keepdims=True) * 1e6)
    return whole


def resampled(layers: int, experts: int, seed: int) -> Array:
    """float64 [layers, experts], drawn from the real loads with noise of a tenth."""
    random = np.random.default_rng(seed)
    rows = random.choice(REAL_LOAD, size=(layers, experts)) * np.exp(0.1 * random.standard_normal((layers, experts)))
    return np.round(rows)


def cases() -> Iterator[Case]:
    yield Case("published example", np.array(EPLB_EXAMPLE, dtype=float), 8, 16)
    yield Case("real, 16 experts", np.array([REAL_LOAD], dtype=float), 4, 20)
    yield Case("real, drawn anew", resampled(4, 256, 0), 32, 288)
    for exponent in (0.0, 0.5, 1.0):
        yield Case(f"Zipf {exponent}, few", zipf(4, 64, exponent, 1), 16, 80)
        yield Case(f"Zipf {exponent}, many", zipf(4, 256, exponent, 2), 64, 320)
    yield Case("Zipf 0.5, no spare slots", zipf(4, 128, 0.5, 3), 16, 128)
    yield Case("Zipf 0.8, two slots each", zipf(4, 64, 0.8, 4), 48, 96)


def imbalance_rows() -> Iterator[tuple[str, Array, Array, Array]]:
    """(name, imbalance of the heuristic, ours, the bound's) by layer."""
    for case in cases():
        placement = place_experts(case.load, (1, case.devices), replicas=case.replicas, time_limit_s=10)
        means = case.load.sum(1) / case.devices
        slots = case.replicas // case.devices
        greedy = [slowest(load, global_placement(load, case.devices, slots)) for load in case.load]
        size = f"{case.load.shape[1]} experts, {case.replicas} slots, {case.devices} devices"
        yield f"{case.name} | {size}", np.array(greedy) / means, placement.imbalance, placement.bound / means


def print_imbalance() -> None:
    print(
        "## Imbalance\n\nThe slowest device's load over the mean, the average over the layers. EPLB: its global "
        "heuristic.\n"
    )
    print("| load | size | EPLB | autopar | bound | lower by |\n| --- | --- | --- | --- | --- | --- |")
    margins, never_above = [], True
    for name, greedy, ours, bound in imbalance_rows():
        margin = (greedy / ours - 1).mean()
        margins.append(margin)
        never_above &= bool((ours <= greedy * (1 + 1e-12)).all())
        print(f"| {name} | {greedy.mean():.4f} | {ours.mean():.4f} | {bound.mean():.4f} | {margin:.2%} |")
    print(f"\nOn average lower by {np.mean(margins):.2%}; in no layer above EPLB: {'yes' if never_above else 'NO'}.")
    load = np.array(EPLB_EXAMPLE, dtype=float)
    published = [slowest(row, hierarchical_placement(row, 4, 2, 8, 2)) / row.sum() * 8 for row in load]
    print(
        f"EPLB's hierarchical heuristic has {published[0]:.4f} and {published[1]:.4f} on the example, as published.\n"
    )


def print_time() -> None:
    load = zipf(61, 256, 1.0, 5)
    started = time.perf_counter()
    placement = place_experts(load, (8, 8), replicas=320)
    seconds = time.perf_counter() - started
    print("## Time\n\n61 layers of 256 experts, 320 slots on 64 devices (Zipf 1.0), default time limit of 30 s:")
    print(f"{seconds:.1f} s; imbalance {placement.imbalance.mean():.4f} on average, {placement.imbalance.max():.4f} at")
    print(f"most; every layer within {placement.gap.max():.2%} of its bound.\n")


def print_moves() -> None:
    before = zipf(8, 128, 0.8, 6)
    random = np.random.default_rng(7)
    after = np.round(before * np.exp(0.3 * random.standard_normal(before.shape)))
    current = place_experts(before, (4, 8), replicas=160, time_limit_s=10)
    print("## Re-placement\n\n8 layers of 128 experts, 160 slots on 32 devices; each load changed by about 30%.\n")
    print("| move_cost | experts moved | imbalance |\n| --- | --- | --- |")
    for cost in (0, 100, 300, 1000, 10**9):
        placement = place_experts(after, (4, 8), replicas=160, current=current, move_cost=cost, time_limit_s=10)
        print(f"| {cost} | {int(placement.moved.sum())} of {8 * 160} | {placement.imbalance.mean():.4f} |")
    print(f"\nThe mean load of a device is {after.sum(1).mean() / 32:,.0f} tokens.\n")


def print_crossing() -> None:
    print(
        "## Tokens that cross nodes\n\nSimulated: tokens in clusters that share experts, Zipf 0.6 in popularity. A "
        "token walks from\nreplica to replica; placements are made from one sample, the walk is of another. Share of "
        "hops that change nodes:\n"
    )
    print("| size | round-robin | balanced | with affinity | imbalance of these |\n| --- | --- | --- | --- | --- |")
    for experts, clusters, mesh, replicas in ((64, 8, (4, 4), 64), (64, 8, (4, 4), 80), (128, 16, (8, 4), 160)):
        options: dict[str, Any] = {"clusters": clusters, "loyalty": 0.8, "exponent": 0.6}
        seen = clustered_routing(60_000, 8, experts, seeds=(0, 1), **options)
        fresh = clustered_routing(20_000, 8, experts, seeds=(0, 2), **options)
        plain = place_experts(seen.load(), mesh, replicas=replicas, time_limit_s=10)
        close = place_experts(seen.load(), mesh, replicas=replicas, affinity=seen.affinity(), time_limit_s=10)
        modulo = round_robin(8, experts, mesh[0] * mesh[1])
        hops = [
            nodes_crossed(fresh, item, mesh[1]) / fresh.paths.size
            for item in (modulo, plain.assignment, close.assignment)
        ]
        unbalanced = np.mean([slowest(load, item) / load.sum() for load, item in zip(seen.load(), modulo, strict=True)])
        numbers = " | ".join(f"{value:.1%}" for value in hops)
        balance = f"{unbalanced * mesh[0] * mesh[1]:.3f}, {_mean(plain):.3f}, {_mean(close):.3f}"
        print(f"| {experts} experts, {replicas} slots, {mesh[0]} nodes of {mesh[1]} | {numbers} | {balance} |")


def _mean(placement: Placement) -> float:
    return float(placement.imbalance.mean())


INTRODUCTION = """# Where experts stand

`autopar.search.place_experts` chooses, for each layer, which devices hold which experts and how many replicas of each
there are, from the tokens that each expert gets (`expert_load` of a layer of [moe.md](moe.md)). Every device has
equally many slots. `pmodel.rebalance(replicas=...)` brings a running module there.

```python
>>> from autopar.search import place_experts
>>> placement = place_experts([[90, 10, 40, 60]], (1, 2), replicas=6)
>>> placement.device_load.tolist(), placement.bound.tolist()
([[100.0, 100.0]], [100.0])

```

The slowest device's load comes first: greedy starts with several rules for the number of replicas, local search, then
an integer program (CP-SAT) of the whole layer where it is small, of a few devices at a time where not. The answer
carries a proven bound and is never above EPLB's greedy. Then come tokens that cross nodes: replicas are spread over
nodes; with `affinity=`, the tokens by expert in one layer and in the next, experts that share tokens share a node, for
up to `load_tolerance` more load. `current=` keeps what stands where that costs nothing, and `move_cost=` is what a
moved expert must save.

From the shell: `autopar place-experts load.json --mesh 8x8 --replicas 320 --save placement.json`.
"""


def main() -> None:
    print(INTRODUCTION)
    print("The rest of this page is made by `python -m benchmarks.expert_placement > docs/experts.md` with OR-Tools")
    print(f"{ortools.__version__} on {platform.machine()}, one thread, {dt.date.today()}.\n")
    print_imbalance()
    print_time()
    print_moves()
    print_crossing()


if __name__ == "__main__":
    main()
