"""The heuristic of DeepSeek's EPLB, for comparison and as a first placement to improve on.

Source: github.com/deepseek-ai/EPLB, README: "hierarchical" and "global" load balancing.
"""

from __future__ import annotations

import numpy as np

from autopar.search.experts.inputs import Array


def packed(weights: Array, packs: int) -> Array:
    """int64 [items]: the pack of each item. Heaviest first, each to the lightest pack that is not full.

    All packs get the same number of items; `packs` divides them.
    """
    room = np.full(packs, len(weights) // packs)
    filled = np.zeros(packs)
    pack_of = np.zeros(len(weights), dtype=np.int64)
    for item in np.argsort(-weights, kind="stable"):
        pack = int(np.where(room > 0, filled, np.inf).argmin())
        pack_of[item] = pack
        filled[pack] += weights[item]
        room[pack] -= 1
    return pack_of


def replica_counts(load: Array, replicas: int) -> Array:
    """int64 [experts]: replicas of each expert, in all `replicas`; one more, each time, of the most loaded one.

    No other counts have a smaller largest load per replica (as apportionment by D'Hondt's divisors).
    """
    counts = np.ones(len(load), dtype=np.int64)
    for _ in range(replicas - len(load)):
        counts[int((load / counts).argmax())] += 1
    return counts


def global_placement(load: Array, devices: int, slots: int) -> Array:
    """int64 [devices, slots], the expert in each slot: replicate, then pack, over all devices at once."""
    counts = replica_counts(load, devices * slots)
    experts = np.repeat(np.arange(len(load)), counts)
    device_of = packed((load / counts)[experts], devices)
    return experts[np.argsort(device_of, kind="stable")].reshape(devices, slots)


def hierarchical_placement(load: Array, groups: int, nodes: int, devices: int, slots: int) -> Array:
    """int64 [devices, slots]: groups of experts to nodes, then as above within each node.

    `groups` divides the experts, `nodes` divides the groups and the devices.
    """
    group_of = np.arange(len(load)) // (len(load) // groups)
    node_of_group = packed(np.bincount(group_of, weights=load), nodes)
    parts = []
    for node in range(nodes):
        experts = np.flatnonzero(node_of_group[group_of] == node)
        parts.append(experts[global_placement(load[experts], devices // nodes, slots)])
    return np.concatenate(parts)
