"""Part of a network with everything else fixed: the neighbourhood that large-neighbourhood search re-solves."""

from __future__ import annotations

import numpy as np

from autopar.search.network import Loads, Network


def subnetwork(network: Network, free: list[int], positions: dict[int, int]) -> Network:
    """The problem of choosing `free` nodes while all others stay at `positions`.

    Node i of the result is free[i], and its labels are positions in that node. Capacities are what the fixed nodes
    leave, but never less than what the free nodes use now, so the present choice stays feasible.
    """
    place = {node: index for index, node in enumerate(free)}
    small = Network([network.size(node) for node in free], network.quantum)
    for node, index in place.items():
        costs = network.unary[node]
        for other, matrix in network.links[node].items():
            if other not in place:
                costs = costs + matrix[:, positions[other]]
            elif node < other:
                small.link(index, place[other], matrix.copy())
        small.unary[index] = costs.copy()
    loads = {
        index: [Loads(load.first, load.last, network.amounts(node), small.labels[index])]
        for node, index in place.items()
        if (load := network.loads.get(node)) is not None
    }
    if not loads:
        return small
    own = network.usage_of_nodes(free, positions)
    left = network.capacity - network.usage_of(positions) + own
    small.times, small.capacity = np.arange(len(network.times)), np.maximum(left, own)
    small.store_loads(loads)
    return small
