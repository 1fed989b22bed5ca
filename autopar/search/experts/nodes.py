"""Which node each replica goes to, so that tokens seldom cross nodes, and which of the node's devices."""

from __future__ import annotations

import time

import numpy as np

from autopar.search.experts.balance import Balancer, device_loads, packed_slots
from autopar.search.experts.eplb import packed
from autopar.search.experts.inputs import Array, Cluster, Question
from autopar.search.experts.traffic import Surroundings, Units, arriving, origins, swap_units

SWEEPS = 4  # over the layers, forth and back in turn
MEANS = 20  # iterations of k-means
DEVICE_ROOM = 0.5  # of what a device's load may grow, how much a node's may: the rest is for dealing out its devices
SPREAD_ROOM = 1.02  # of the mean, what a node's load may be where nothing but the spread of replicas is decided


def spread_over_nodes(load: Array, slots: Array, cluster: Cluster) -> Array:
    """The same devices in another order: nodes of like load, the replicas of an expert on different nodes.

    `slots` [devices, slots] of one layer, whose tokens start on any node alike.
    """
    loads = device_loads(load, slots)
    node_of = packed(loads, cluster.nodes)
    around = Surroundings(load, arriving(None, None, len(load), cluster.nodes))
    units = device_units(load, slots, SPREAD_ROOM * float(loads.sum()) / cluster.nodes)
    return slots[np.argsort(swap_units(units, node_of, around, cluster.nodes), kind="stable")]


def device_units(load: Array, slots: Array, limit: float) -> Units:
    """All that stands on a device, moved as one."""
    held = np.zeros((len(slots), len(load)))
    np.add.at(held, (np.arange(len(slots))[:, None], slots), 1.0)
    return Units(held, device_loads(load, slots), limit)


def place_by_affinity(question: Question, balanced: list[Array], limits: Array, deadline: float) -> list[Array]:
    """Placements with the replicas of `balanced`, dealt out so that fewer tokens cross nodes.

    `balanced` [devices, slots] by layer; no device gets more load than the layer's limit. After the deadline, of
    time.monotonic(), what is left to improve stays as it is.
    """
    search = _Affinity(question, balanced, limits, deadline)
    search.start()
    for sweep in range(SWEEPS):
        search.sweep(backwards=sweep % 2 == 0)
    return search.devices()


class _Affinity:
    """Holds the node of every replica of every layer."""

    def __init__(self, question: Question, balanced: list[Array], limits: Array, deadline: float) -> None:
        self.question, self.balanced, self.limits, self.deadline = question, balanced, limits, deadline
        self.cluster, self.experts = question.cluster, question.load.shape[1]
        self.origin = origins(question.affinity, question.load)
        self.counts = [np.bincount(slots.ravel(), minlength=self.experts) for slots in balanced]
        self.replicas = [np.repeat(np.arange(self.experts), counts) for counts in self.counts]
        self.node_of: list[Array | None] = [None] * len(balanced)

    def start(self) -> None:
        """Cluster the experts of the middle layer, then follow their tokens to both ends."""
        middle = len(self.balanced) // 2
        self.node_of[middle] = self._dealt(middle, cluster_experts(self.question, middle, self.cluster.nodes))
        for layer in (*range(middle - 1, -1, -1), *range(middle + 1, len(self.balanced))):
            self.node_of[layer] = self._dealt(layer, self._wishes(layer))
            self._improve(layer)

    def sweep(self, *, backwards: bool) -> None:
        """Improve every layer once, given its neighbours."""
        layers = range(len(self.balanced))
        for layer in reversed(layers) if backwards else layers:
            self._improve(layer)

    def _weights(self, layer: int) -> Array:
        """float64 [replicas]: the load of each."""
        weights: Array = (self.question.load[layer] / self.counts[layer])[self.replicas[layer]]
        return weights

    def _node_limit(self, layer: int) -> float:
        mean = self.question.load[layer].sum() / self.cluster.devices
        room = mean + DEVICE_ROOM * (self.limits[layer] - mean)
        return float(room) * self.cluster.devices_per_node

    def _shares(self, layer: int) -> Array | None:
        node_of = self.node_of[layer] if 0 <= layer < len(self.node_of) else None
        if node_of is None:
            return None
        shares = np.zeros((self.experts, self.cluster.nodes))
        np.add.at(shares, (self.replicas[layer], node_of), 1 / self.counts[layer][self.replicas[layer]])
        return shares

    def _wishes(self, layer: int) -> Array:
        """float64 [experts, nodes]: where a layer's one placed neighbour would like its experts."""
        assert self.origin is not None
        before, after = self._shares(layer - 1), self._shares(layer + 1)
        if before is not None:
            return arriving(self.origin[layer - 1], before, self.experts, self.cluster.nodes)
        assert after is not None
        goes = self.origin[layer] * self.question.load[layer + 1]
        wishes: Array = goes @ after / np.maximum(goes.sum(1, keepdims=True), 1e-300)
        return wishes

    def _dealt(self, layer: int, wishes: Array) -> Array:
        """int64 [replicas]: nodes by wish, heaviest replicas first, within each node's slots and load."""
        weights, experts = self._weights(layer), self.replicas[layer]
        nodes, limit = self.cluster.nodes, self._node_limit(layer)
        room = np.full(nodes, self.cluster.devices_per_node * self.question.slots)
        filled, node_of = np.zeros(nodes), np.zeros(len(experts), dtype=np.int64)
        for replica in np.argsort(-weights, kind="stable"):
            open_nodes = room > 0
            fits = open_nodes & (filled + weights[replica] <= limit)
            wish = np.where(fits, wishes[experts[replica]], -np.inf)
            node = int(wish.argmax()) if fits.any() else int(np.where(open_nodes, filled, np.inf).argmin())
            node_of[replica] = node
            room[node] -= 1
            filled[node] += weights[replica]
        return node_of

    def _improve(self, layer: int) -> None:
        node_of = self.node_of[layer]
        assert node_of is not None and self.origin is not None
        if time.monotonic() > self.deadline:
            return
        held = np.zeros((len(node_of), self.experts))
        held[np.arange(len(node_of)), self.replicas[layer]] = 1.0
        units = Units(held, self._weights(layer), self._node_limit(layer))
        self.node_of[layer] = swap_units(units, node_of, self._surroundings(layer), self.cluster.nodes)

    def _surroundings(self, layer: int) -> Surroundings:
        assert self.origin is not None
        load, nodes = self.question.load, self.cluster.nodes
        known = None if layer == 0 else self.origin[layer - 1]
        arrives = arriving(known, self._shares(layer - 1), self.experts, nodes)
        after = self._shares(layer + 1)
        if after is None:
            return Surroundings(load[layer], arrives)
        return Surroundings(load[layer], arrives, load[layer + 1], after, self.origin[layer])

    def devices(self) -> list[Array]:
        """[devices, slots] by layer, no device above the layer's limit."""
        return [self._dealt_out(layer) for layer in range(len(self.balanced))]

    def _dealt_out(self, layer: int) -> Array:
        """Each node's replicas on its devices.

        Where a device has too much, it exchanges with other nodes; if that is not enough, the balanced devices are kept
        whole and only change their nodes.
        """
        load, limit = self.question.load[layer], float(self.limits[layer])
        balancer = Balancer(load, self._within_nodes(layer))
        if balancer.run(limit) > limit:
            return self._whole_devices(layer)
        self._note(layer, balancer.slots)
        return balancer.slots

    def _within_nodes(self, layer: int) -> Array:
        weights, experts, node_of = self._weights(layer), self.replicas[layer], self.node_of[layer]
        assert node_of is not None
        parts = []
        for node in range(self.cluster.nodes):
            here = np.flatnonzero(node_of == node)
            alone = np.ones(len(here), dtype=np.int64)
            balancer = Balancer(weights[here], packed_slots(weights[here], alone, self.cluster.devices_per_node))
            balancer.run(float(self.limits[layer]))
            parts.append(experts[here[balancer.slots]])
        return np.concatenate(parts)

    def _whole_devices(self, layer: int) -> Array:
        """The balanced devices, each in the node that suits its neighbours."""
        slots, nodes = self.balanced[layer], self.cluster.nodes
        units = device_units(self.question.load[layer], slots, np.inf)
        start = np.arange(len(slots)) // self.cluster.devices_per_node
        node_of = swap_units(units, start, self._surroundings(layer), nodes)
        ordered = slots[np.argsort(node_of, kind="stable")]
        self._note(layer, ordered)
        return ordered

    def _note(self, layer: int, slots: Array) -> None:
        """Take over what stands where, for the layers that are still to be dealt out."""
        order = np.argsort(slots.ravel(), kind="stable")
        self.replicas[layer] = slots.ravel()[order]
        self.counts[layer] = np.bincount(slots.ravel(), minlength=self.experts)
        self.node_of[layer] = np.repeat(self.cluster.node_of(), slots.shape[1])[order]


def cluster_experts(question: Question, layer: int, nodes: int) -> Array:
    """float64 [experts, nodes]: how well each expert of a layer fits each cluster of experts that share tokens.

    Experts are alike whose tokens come from, and go to, the same experts; the clusters are k-means of the leading
    eigenvectors of that likeness (Ng, Jordan and Weiss, NeurIPS 2001).
    """
    assert question.affinity is not None
    experts = question.load.shape[1]
    sides = [question.affinity[layer]] if layer < len(question.affinity) else []
    sides += [question.affinity[layer - 1].T] if layer > 0 else []
    likeness = np.zeros((experts, experts))
    for side in sides:
        rows = side / np.sqrt(np.maximum(side.sum(0, keepdims=True), 1e-300))
        likeness += rows @ rows.T
    scale = 1 / np.sqrt(np.maximum(likeness.sum(1), 1e-300))
    vectors = np.linalg.eigh(likeness * scale * scale[:, None])[1][:, -min(nodes, experts) :]
    points = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    fits: Array = points @ _means(points, question.load[layer], nodes).T
    return fits


def _means(points: Array, load: Array, clusters: int) -> Array:
    """[clusters, dims] by k-means on the sphere, from points that are far from each other; the same on every run."""
    chosen = [int(load.argmax())]
    while len(chosen) < clusters:
        nearest = (points @ points[chosen].T).max(1)
        chosen.append(int(nearest.argmin()))
    means = points[chosen]
    for _ in range(MEANS):
        cluster_of = (points @ means.T).argmax(1)
        for cluster in range(clusters):
            inside = cluster_of == cluster
            total = (points[inside] * (load[inside, None] + 1e-9)).sum(0)
            if np.linalg.norm(total) > 0:
                means[cluster] = total / np.linalg.norm(total)
    return means
