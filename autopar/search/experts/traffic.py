"""Tokens that cross nodes on their way to an expert, and moves that make them fewer.

A token reaches a layer on some node: where the expert of the layer before was, if `affinity` says which that was,
else on any node alike. All replicas of an expert get the same number of tokens; of those, as many as can be stay in
their node. So of the tokens of an expert, sum over nodes of min(share that arrives there, share of the replicas there)
stay.

That an expert's tokens are already where their last expert was is the traffic of Yao et al., "Exploiting Inter-Layer
Expert Affinity for Accelerating Mixture-of-Experts Model Inference", IPDPS 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.search.experts.inputs import Array, Question

SWAPS = 16  # at once, before the gains are computed anew
ROUNDS = 60  # of swaps in one layer
ROUNDING = 1e-9


def replica_shares(slots: Array, node_of: Array, experts: int, nodes: int) -> Array:
    """float64 [experts, nodes]: the share of an expert's replicas on each node. `slots` [devices, slots]."""
    held = np.zeros((experts, nodes))
    np.add.at(held, (slots, node_of[:, None]), 1.0)
    shares: Array = held / held.sum(1, keepdims=True)
    return shares


def origins(affinity: Array | None, load: Array) -> Array | None:
    """float64 [layers - 1, experts, experts]: for each expert (last dim), where its tokens' last expert was; sums to 1.

    An expert that `affinity` knows no token of gets its tokens from all experts by their load.
    """
    if affinity is None:
        return None
    totals = affinity.sum(1, keepdims=True)
    before = load[:-1] / np.maximum(load[:-1].sum(1, keepdims=True), 1e-300)
    before = np.where(load[:-1].sum(1, keepdims=True) > 0, before, 1 / load.shape[1])
    known: Array = np.where(totals > 0, affinity / np.where(totals > 0, totals, 1.0), before[:, :, None])
    return known


def arriving(origin: Array | None, shares_before: Array | None, experts: int, nodes: int) -> Array:
    """float64 [experts, nodes]: the share of each expert's tokens that starts on each node."""
    if origin is None or shares_before is None:
        return np.full((experts, nodes), 1 / nodes)
    arrives: Array = origin.T @ shares_before
    return arrives


def crossing(load: Array, arrives: Array, shares: Array) -> float:
    """Tokens of one layer that leave their node."""
    return float((load * (1 - np.minimum(arrives, shares).sum(1))).clip(min=0).sum())


def crossing_tokens(question: Question, assignment: Array) -> Array:
    """float64 [layers]."""
    layers, experts = question.load.shape
    nodes, node_of = question.cluster.nodes, question.cluster.node_of()
    origin = origins(question.affinity, question.load)
    found, before = np.zeros(layers), None
    for layer in range(layers):
        shares = replica_shares(assignment[layer], node_of, experts, nodes)
        arrives = arriving(None if origin is None or layer == 0 else origin[layer - 1], before, experts, nodes)
        found[layer] = crossing(question.load[layer], arrives, shares)
        before = shares
    return found


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a layer's traffic depends on besides its own placement.

    `load` [experts] and `arrives` [experts, nodes] of the layer; for the next layer its load, its replicas' shares
    [experts, nodes] and the origins [experts here, experts there] of its tokens, or None.
    """

    load: Array
    arrives: Array
    next_load: Array | None = None
    next_shares: Array | None = None
    origin: Array | None = None

    def crossing(self, shares: Array) -> float:
        """Tokens that leave their node on the way into this layer and into the next."""
        here = crossing(self.load, self.arrives, shares)
        if self.next_load is None or self.next_shares is None or self.origin is None:
            return here
        return here + crossing(self.next_load, self.origin.T @ shares, self.next_shares)

    def gains(self, counts: Array, shares: Array) -> tuple[Array, Array]:
        """Tokens that stay if a node gets one replica more, [experts, nodes]; that leave if it has one less, the same.

        Exact for an expert's own tokens, a derivative for those of the next layer.
        """
        step = 1 / counts[:, None]
        kept = np.minimum(self.arrives, shares)
        more = self.load[:, None] * (np.minimum(self.arrives, shares + step) - kept)
        less = self.load[:, None] * (kept - np.minimum(self.arrives, shares - step))
        if self.next_load is not None and self.next_shares is not None and self.origin is not None:
            arrives = self.origin.T @ shares
            weights = self.origin * self.next_load / counts[:, None]
            more = more + weights @ (arrives < self.next_shares - ROUNDING)
            less = less + weights @ (arrives <= self.next_shares + ROUNDING)
        return more, less


@dataclass(frozen=True, slots=True)
class Units:
    """What is moved between nodes as one: single replicas, or all that stands on a device.

    `held` float64 [units, experts], replicas of each expert; `loads` [units]; a node may hold up to `limit` of load.
    """

    held: Array
    loads: Array
    limit: float


def swap_units(units: Units, node_of: Array, around: Surroundings, nodes: int) -> Array:
    """`node_of` int64 [units] after swaps between nodes that let fewer tokens cross.

    Every node keeps its number of units; its load stays within the limit, or does not grow.
    """
    node_of = node_of.copy()
    counts = units.held.sum(0)
    shares = _shares(units, node_of, nodes, counts)
    best = around.crossing(shares)
    at_once = SWAPS
    for _ in range(ROUNDS):
        pairs = _promising(units, node_of, around.gains(counts, shares), at_once, nodes)
        if not len(pairs):
            break
        tried = node_of.copy()
        tried[pairs] = node_of[pairs[:, ::-1]]
        after = _shares(units, tried, nodes, counts)
        value = around.crossing(after)
        if value < best * (1 - ROUNDING):
            node_of, shares, best = tried, after, value
        elif at_once == 1:
            break
        else:
            at_once = 1
    return node_of


def _shares(units: Units, node_of: Array, nodes: int, counts: Array) -> Array:
    held = np.zeros((nodes, units.held.shape[1]))
    np.add.at(held, node_of, units.held)
    shares: Array = (held / counts).T
    return shares


def _promising(units: Units, node_of: Array, gains: tuple[Array, Array], most: int, nodes: int) -> Array:
    """int64 [pairs, 2]: units to swap, no unit twice, those of the largest gain first."""
    rows = np.arange(len(node_of))
    more = units.held @ gains[0]
    stays = (units.held @ gains[1])[rows, node_of]
    gain = more[:, node_of] - stays[:, None]
    gain = np.triu(gain + gain.T, 1)
    gain[node_of[:, None] == node_of] = 0.0
    floor = ROUNDING * max(1.0, float(np.abs(gain).max()))
    order = np.argsort(-gain, axis=None, kind="stable")[: 4 * most * nodes]
    filled = np.bincount(node_of, weights=units.loads, minlength=nodes)
    pairs: list[tuple[int, int]] = []
    used: set[int] = set()
    for first, second in zip(*np.unravel_index(order, gain.shape), strict=True):
        if gain[first, second] <= floor or len(pairs) == most:
            break
        if first in used or second in used:
            continue
        change = float(units.loads[second] - units.loads[first])
        growing = node_of[first] if change > 0 else node_of[second]
        if change != 0 and filled[growing] + abs(change) > units.limit:
            continue
        filled[node_of[first]] += change
        filled[node_of[second]] -= change
        used |= {first, second}
        pairs.append((int(first), int(second)))
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)
