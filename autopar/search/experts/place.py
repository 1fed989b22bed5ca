"""place_experts(): which devices hold which experts, from how many tokens each expert gets."""

from __future__ import annotations

import math
import time
from numbers import Real
from typing import Any

import numpy as np

from autopar.errors import ExpertPlacementError
from autopar.search.experts.balance import greedy_slots, slowest
from autopar.search.experts.inputs import AnyMesh, Array, Question, read_question
from autopar.search.experts.keep import keep_what_is_worth_it
from autopar.search.experts.layer import Effort, balance_layer
from autopar.search.experts.nodes import place_by_affinity, spread_over_nodes
from autopar.search.experts.placement import Placement, make_placement

SOLVER_SHARE = 0.25  # of the time limit, for CP-SAT, whose deterministic unit takes one to two seconds
BALANCING_SHARE = 0.5  # of the time limit, where traffic or moves are to be decided after it
MOST_EFFORT = 30.0  # for one layer


def place_experts(
    load: Any,
    mesh: AnyMesh,
    *,
    replicas: int | None = None,
    affinity: Any = None,
    current: Any = None,
    time_limit_s: float = 30.0,
    move_cost: float = 0.0,
    load_tolerance: float = 0.02,
    devices_per_node: int | None = None,
) -> Placement:
    """Choose the devices of every expert, and how many replicas of it there are, for each layer.

    `load`: [layers, experts], tokens that each expert gets. `mesh`: an `autopar.Mesh`, a `DeviceMesh` or sizes, (nodes,
    devices in a node). `replicas`: expert slots in all, by layer; every device has equally many; by default the fewest
    that hold all experts. Memory is what bounds it: a device holds replicas / devices experts of each layer.

    The slowest device's load is minimised first: it is never above that of the greedy of EPLB. Then tokens that cross
    nodes are: with `affinity` [layers - 1, experts, experts], the tokens by expert in a layer and in the next one, for
    up to `load_tolerance` more load on the slowest device (as a share), never beyond the greedy's; without, only by
    spreading replicas over nodes. With `current`, a placement or its assignment, devices keep what they hold where that
    costs nothing; `move_cost` is the load that a moved expert must save on the slowest device of its layer.

    `devices_per_node` overrides what the mesh says. The same call gives the same answer as long as the time limit does
    not cut it short. Raises `ExpertPlacementError`.

    >>> placement = place_experts([[90, 10, 40, 60]], (1, 2), replicas=6)
    >>> placement.device_load.tolist(), placement.assignment.shape
    ([[100.0, 100.0]], (1, 2, 3))
    """
    for name, value in (("time_limit_s", time_limit_s), ("move_cost", move_cost), ("load_tolerance", load_tolerance)):
        if not (isinstance(value, Real) and math.isfinite(value) and value >= 0):
            raise ExpertPlacementError(f"{name} is {value!r}", fix="give a number >= 0")
    question = read_question(load, mesh, replicas, affinity, current, devices_per_node)
    started = time.monotonic()
    alone = affinity is None and current is None
    balancing_s = time_limit_s if alone else BALANCING_SHARE * time_limit_s
    layers, bounds = balance_layers(question, balancing_s, started + balancing_s)
    layers = arrange(question, layers, load_tolerance, started + time_limit_s)
    if question.current is not None:
        effort = Effort(solver_effort(balancing_s, len(layers)), started + time_limit_s)
        layers = keep_what_is_worth_it(question, layers, bounds, move_cost, effort)
    return make_placement(question, layers, bounds)


def solver_effort(time_limit_s: float, layers: int) -> float:
    """CP-SAT's deterministic time for one of so many layers."""
    return min(MOST_EFFORT, SOLVER_SHARE * time_limit_s / layers)


def balance_layers(question: Question, time_limit_s: float, deadline: float) -> tuple[list[Array], Array]:
    """([devices, slots] by layer, lower bounds [layers]), whichever node a device is in."""
    found, bounds = [], []
    count = len(question.load)
    for layer, load in enumerate(question.load):
        share_s = max(0.0, deadline - time.monotonic()) / (count - layer)
        effort = Effort(solver_effort(time_limit_s, count), time.monotonic() + share_s)
        slots, bound = balance_layer(load, question.cluster.devices, question.slots, effort, layer)
        found.append(slots)
        bounds.append(bound)
    return found, np.array(bounds)


def arrange(question: Question, layers: list[Array], load_tolerance: float, deadline: float) -> list[Array]:
    """The devices in their nodes; with affinity, the replicas dealt out anew within the tolerance."""
    if question.cluster.nodes == 1:
        return layers
    if question.affinity is None:
        return [
            spread_over_nodes(load, slots, question.cluster) for load, slots in zip(question.load, layers, strict=True)
        ]
    limits = []
    for load, slots in zip(question.load, layers, strict=True):
        least = slowest(load, slots)
        greedy = slowest(load, greedy_slots(load, question.cluster.devices, question.slots))
        limits.append(max(least, min(greedy, least * (1 + load_tolerance))))
    return place_by_affinity(question, layers, np.array(limits), deadline)
