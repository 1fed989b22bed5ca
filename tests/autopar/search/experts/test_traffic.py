from __future__ import annotations

import numpy as np
import pytest

from autopar.search.experts.inputs import read_question
from autopar.search.experts.place import place_experts
from autopar.search.experts.traffic import Surroundings, crossing_tokens, replica_shares
from benchmarks.clustered_routing import Routing, clustered_routing, nodes_crossed, round_robin

SHAPE = {"clusters": 4, "loyalty": 0.9, "exponent": 0.5}


def test_tokens_that_cross_are_those_of_a_walk_from_replica_to_replica() -> None:
    routing = clustered_routing(2000, 3, 8, seeds=(0, 1), **SHAPE)
    assignment = round_robin(3, 8, 4)
    question = read_question(routing.load(), (2, 2), 8, routing.affinity(), None, None)
    crossing = crossing_tokens(question, assignment)
    walked = nodes_crossed(routing, assignment, 2)
    into_the_first = nodes_crossed(Routing(routing.paths[:, :1], 8), assignment[:1], 2)
    assert crossing[1:].sum() == pytest.approx(walked - into_the_first)
    assert crossing[0] == pytest.approx(1000)


def test_a_replica_in_every_node_keeps_all_tokens_at_home() -> None:
    question = read_question([[6, 2, 2, 2]], (2, 2), None, None, None, None)
    spread, together = np.array([[[0, 1], [2, 3], [0, 1], [2, 3]]]), np.array([[[0, 0], [1, 1], [2, 2], [3, 3]]])
    assert crossing_tokens(question, spread).tolist() == [0]
    assert crossing_tokens(question, together).tolist() == [6]


def test_gains_of_one_replica_are_those_of_counting_anew() -> None:
    random = np.random.default_rng(0)
    slots, node_of = np.array([[0, 1], [2, 3], [4, 5], [6, 7]]), np.array([0, 0, 1, 1])
    shares = replica_shares(slots, node_of, 8, 2)
    arrives = random.dirichlet([1, 1], size=8)
    origin = random.dirichlet(np.ones(8), size=8).T
    around = Surroundings(random.random(8), arrives, random.random(8), shares[::-1].copy(), origin)
    more, less = around.gains(np.ones(8), shares)
    swapped = np.array([[4, 1], [2, 3], [0, 5], [6, 7]])  # 0 and 4 change nodes
    after = replica_shares(swapped, node_of, 8, 2)
    gain = more[0, 1] - less[0, 0] + more[4, 0] - less[4, 1]
    assert around.crossing(shares) - around.crossing(after) == pytest.approx(gain)


def test_replicas_are_spread_over_nodes_when_that_costs_no_load() -> None:
    placement = place_experts([[40, 40, 10, 10, 10, 10]], (2, 2), replicas=8, time_limit_s=2)
    assert placement.imbalance.tolist() == pytest.approx([1.0])
    assert placement.crossing[0] == pytest.approx(20)  # of the experts with one replica, half


def test_affinity_saves_crossings_within_the_tolerance_of_load() -> None:
    seen = clustered_routing(20_000, 6, 32, seeds=(0, 1), **SHAPE)
    fresh = clustered_routing(5_000, 6, 32, seeds=(0, 2), **SHAPE)
    plain = place_experts(seen.load(), (4, 4), replicas=32, time_limit_s=3)
    close = place_experts(seen.load(), (4, 4), replicas=32, affinity=seen.affinity(), time_limit_s=3)
    assert (close.device_load.max(1) <= plain.device_load.max(1) * 1.02 * (1 + 1e-9)).all()
    walked = [nodes_crossed(fresh, item, 4) for item in (round_robin(6, 32, 16), plain.assignment, close.assignment)]
    assert walked[2] < 0.6 * walked[0]
    assert walked[2] < 0.6 * walked[1]
    assert close.crossing.sum() < plain.crossing.sum()
