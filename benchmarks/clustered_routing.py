"""Routing of tokens in clusters of Zipf popularity, and the walk of such tokens over nodes. For expert placement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Routing:
    """`paths`: int64 [tokens, layers], the expert of each token in each layer."""

    paths: Array
    experts: int

    def load(self) -> Array:
        """float64 [layers, experts]: tokens of each expert."""
        columns = self.paths.T
        return np.stack([np.bincount(column, minlength=self.experts) for column in columns]).astype(np.float64)

    def affinity(self) -> Array:
        """float64 [layers - 1, experts, experts]: tokens with an expert in a layer and one in the next."""
        pairs = self.paths[:, :-1] * self.experts + self.paths[:, 1:]
        counts = [np.bincount(column, minlength=self.experts**2) for column in pairs.T]
        return np.stack(counts).reshape(-1, self.experts, self.experts).astype(np.float64)


def clustered_routing(
    tokens: int, layers: int, experts: int, *, clusters: int, loyalty: float, exponent: float, seeds: tuple[int, int]
) -> Routing:
    """Tokens of a cluster mostly use the cluster's experts, which are others in every layer.

    A cluster's popularity falls as 1 / rank ** exponent, and so does that of the experts within a cluster. A token
    follows its cluster with probability `loyalty` in each layer, else it takes any expert. `seeds`: of the model, and
    of the tokens.
    """
    model, draw = (np.random.default_rng(seed) for seed in seeds)
    popularity = 1 / np.arange(1, clusters + 1) ** exponent
    cluster = draw.choice(clusters, size=tokens, p=popularity / popularity.sum())
    paths = np.empty((tokens, layers), dtype=np.int64)
    size = experts // clusters
    within = 1 / np.arange(1, size + 1) ** exponent
    for layer in range(layers):
        order = model.permutation(experts)
        own = order[cluster * size + draw.choice(size, size=tokens, p=within / within.sum())]
        paths[:, layer] = np.where(draw.random(tokens) < loyalty, own, draw.integers(experts, size=tokens))
    return Routing(paths, experts)


def nodes_crossed(routing: Routing, assignment: Array, devices_per_node: int) -> int:
    """How often tokens change nodes: each walks from replica to replica, starting on any node.

    Every replica takes the same number of its expert's tokens; those in its own node first.
    """
    _, devices, _ = assignment.shape
    nodes = devices // devices_per_node
    node = np.arange(len(routing.paths)) % nodes
    crossed = 0
    for layer, slots in enumerate(assignment):
        held = np.zeros((routing.experts, nodes), dtype=np.int64)
        np.add.at(held, (slots, np.arange(devices)[:, None] // devices_per_node), 1)
        chosen = np.empty_like(node)
        for expert in range(routing.experts):
            here = np.flatnonzero(routing.paths[:, layer] == expert)
            chosen[here] = _walked(node[here], held[expert])
        crossed += int((chosen != node).sum())
        node = chosen
    return crossed


def _walked(node: Array, held: Array) -> Array:
    """The nodes that an expert's tokens go to; `held` [nodes], its replicas there."""
    room = np.floor(len(node) * held / held.sum()).astype(np.int64)
    room[np.flatnonzero(held)[: len(node) - int(room.sum())]] += 1
    chosen = np.full_like(node, -1)
    for name in np.flatnonzero(room):
        staying = np.flatnonzero(node == name)[: room[name]]
        chosen[staying] = name
        room[name] -= len(staying)
    chosen[chosen < 0] = np.repeat(np.arange(len(held)), room)
    return chosen


def round_robin(layers: int, experts: int, devices: int) -> Array:
    """int64 [layers, devices, slots]: expert e on device e modulo devices."""
    one = np.arange(experts).reshape(-1, devices).T
    return np.broadcast_to(one, (layers, *one.shape)).copy()
