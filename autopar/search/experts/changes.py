"""A new placement against the one that stands: which experts must move, and placements that move fewer."""

from __future__ import annotations

import numpy as np

from autopar.search.experts.inputs import Array, Cluster


def held_experts(slots: Array, experts: int) -> Array:
    """bool [experts, devices]: what a layer's `slots` [devices, slots] hold."""
    held = np.zeros((experts, len(slots)), dtype=bool)
    held[slots, np.arange(len(slots))[:, None]] = True
    return held


def moved_experts(slots: Array, current: Array, experts: int) -> int:
    """Experts that must arrive on a device that does not hold them, in one layer."""
    return int((held_experts(slots, experts) & ~held_experts(current, experts)).sum())


def matched_to_current(slots: Array, current: Array, experts: int) -> Array:
    """The same devices in the order that moves the fewest experts. Devices are alike: their load stays what it is."""
    new, old = held_experts(slots, experts).astype(float), held_experts(current, experts).astype(float)
    rows, columns = assigned(-(new.T @ old))
    ordered: Array = slots[rows[np.argsort(columns)]]
    return ordered


def matched_within_nodes(slots: Array, current: Array, experts: int, cluster: Cluster) -> Array:
    """The same, with the devices of a node staying together: traffic between nodes stays what it is."""
    nodes, size = cluster.nodes, cluster.devices_per_node
    new, old = held_experts(slots, experts).astype(float), held_experts(current, experts).astype(float)
    common = (new.T @ old).reshape(nodes, size, nodes, size).transpose(0, 2, 1, 3)
    kept = np.zeros((nodes, nodes))
    orders = {}
    for source in range(nodes):
        for target in range(nodes):
            rows, columns = assigned(-common[source, target])
            kept[source, target] = common[source, target][rows, columns].sum()
            orders[source, target] = source * size + rows[np.argsort(columns)]
    sources, targets = assigned(-kept)
    order = {target: orders[source, target] for source, target in zip(sources, targets, strict=True)}
    ordered: Array = slots[np.concatenate([order[target] for target in range(nodes)])]
    return ordered


def assigned(costs: Array) -> tuple[Array, Array]:
    """The rows and columns of the cheapest assignment."""
    from scipy.optimize import linear_sum_assignment  # slow to import, and needed here alone

    rows, columns = linear_sum_assignment(costs)
    return rows, columns
