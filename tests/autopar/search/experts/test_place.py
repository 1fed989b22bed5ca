from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autopar.search.experts.balance import slowest
from autopar.search.experts.changes import matched_to_current, matched_within_nodes, moved_experts
from autopar.search.experts.eplb import global_placement
from autopar.search.experts.inputs import Cluster
from autopar.search.experts.place import place_experts
from tests.autopar.search.experts.loads import (
    EPLB_IMBALANCE,
    EPLB_LOAD,
    REAL_LOAD,
    all_placements,
    slowest_by_loops,
    zipf_load,
)


def test_the_published_example_is_balanced_better_than_by_its_heuristic() -> None:
    placement = place_experts(EPLB_LOAD, (2, 4), replicas=16, time_limit_s=5)
    assert placement.assignment.shape == (2, 8, 2)
    assert (placement.imbalance <= np.array([1.0533, 1.1904])).all()  # both optimal
    assert (placement.imbalance < EPLB_IMBALANCE).all()
    assert (placement.bound <= placement.device_load.max(1)).all()
    assert (placement.replicas.sum(1) == 16).all()
    assert placement.replicas.min() >= 1


@pytest.mark.parametrize(
    ("experts", "devices", "replicas"), [(64, 8, 64), (64, 16, 80), (48, 8, 56), (32, 32, 64), (60, 4, 72)]
)
def test_no_layer_is_balanced_worse_than_by_the_heuristic(experts: int, devices: int, replicas: int) -> None:
    loads = np.stack([zipf_load(experts, exponent, 7) for exponent in (0.0, 0.4, 0.8, 1.2)])
    placement = place_experts(loads, (1, devices), replicas=replicas, time_limit_s=4)
    greedy = [slowest(load, global_placement(load, devices, replicas // devices)) for load in loads]
    assert (placement.device_load.max(1) <= np.array(greedy) * (1 + 1e-12)).all()
    assert placement.device_load.max(1).mean() < np.mean(greedy)
    for layer, load in enumerate(loads):
        assert placement.device_load[layer].max() == pytest.approx(slowest_by_loops(load, placement.assignment[layer]))
        assert set(placement.assignment[layer].ravel()) == set(range(experts))


def test_real_loads_on_four_devices_are_balanced_to_two_thousandths() -> None:
    placement = place_experts([REAL_LOAD], (1, 4), replicas=20, time_limit_s=3)
    assert placement.imbalance[0] < 1.002


def test_the_same_call_gives_the_same_answer() -> None:
    loads = np.stack([zipf_load(64, 0.5, seed) for seed in range(3)])
    first, second = (place_experts(loads, (2, 8), replicas=80) for _ in range(2))
    assert np.array_equal(first.assignment, second.assignment)
    assert np.array_equal(first.bound, second.bound)


def test_a_layer_without_load_is_placed_too() -> None:
    placement = place_experts([[0, 0, 0, 0]], (2, 2), replicas=8)
    assert placement.imbalance.tolist() == [1.0]
    assert placement.gap.tolist() == [0.0]
    assert placement.replicas.min() >= 1


def test_a_placement_prints_what_it_is_and_turns_into_plain_lists() -> None:
    placement = place_experts([[90, 10, 40, 60]], (1, 2), replicas=6)
    assert "1 layers of 4 experts on 2 devices, 3 slots each" in str(placement)
    assert placement.to_dict()["device_load"] == [[100.0, 100.0]]


def test_what_stands_well_stays_where_it_is() -> None:
    load = [zipf_load(16, 0.5, 1)]
    first = place_experts(load, (2, 4), replicas=24, time_limit_s=2)
    again = place_experts(load, (2, 4), replicas=24, current=first, time_limit_s=2)
    assert again.moved.tolist() == [0]
    assert np.array_equal(again.assignment, first.assignment)


def test_devices_keep_what_they_hold_whatever_order_the_search_leaves_them_in() -> None:
    random = np.random.default_rng(0)
    for _ in range(5):
        slots, current = random.integers(6, size=(2, 4, 2))
        best = min(moved_experts(slots[list(order)], current, 6) for order in itertools.permutations(range(4)))
        assert moved_experts(matched_to_current(slots, current, 6), current, 6) == best
        within = [
            moved_experts(slots[[*first, *second]], current, 6)
            for first, second in itertools.product(itertools.permutations((0, 1)), itertools.permutations((2, 3)))
        ] + [
            moved_experts(slots[[*first, *second]], current, 6)
            for first, second in itertools.product(itertools.permutations((2, 3)), itertools.permutations((0, 1)))
        ]
        assert moved_experts(matched_within_nodes(slots, current, 6, Cluster(4, 2)), current, 6) == min(within)


@pytest.mark.parametrize("move_cost", [0.5, 3.0, 20.0])
def test_what_moves_is_what_a_brute_force_would_move(move_cost: float) -> None:
    load, current = np.array([40.0, 30, 20, 10]), np.array([[0, 1], [2, 3]])
    placement = place_experts([load], (1, 2), current=current[None], move_cost=move_cost, time_limit_s=2)
    best = min(
        slowest_by_loops(load, slots) + move_cost * moved_experts(slots, current, 4)
        for slots in all_placements(4, 2, 2)
    )
    found = placement.device_load.max() + move_cost * int(placement.moved.sum())
    assert found == pytest.approx(best)
    assert placement.moved_bytes(1000) == 1000 * int(placement.moved.sum())


def test_a_dearer_move_moves_less_and_balances_less() -> None:
    before, after = zipf_load(64, 0.8, 1), zipf_load(64, 0.8, 2)
    current = place_experts([before], (1, 16), replicas=80, time_limit_s=2)
    moved, slowest_loads = [], []
    for cost in (0.0, 200.0, 2000.0, 1e9):
        placement = place_experts([after], (1, 16), replicas=80, current=current, move_cost=cost, time_limit_s=2)
        moved.append(int(placement.moved.sum()))
        slowest_loads.append(float(placement.device_load.max()))
    assert moved == sorted(moved, reverse=True)
    assert slowest_loads == sorted(slowest_loads)
    assert moved[-1] == 0
    assert moved[1] < moved[0] / 2
    assert math.isclose(slowest_loads[-1], slowest(after, current.assignment[0]))


def test_a_current_placement_without_some_expert_is_left() -> None:
    current = np.array([[[0, 0], [1, 1]]])
    placement = place_experts([[5, 4, 3, 2]], (1, 2), current=current, move_cost=1e9)
    assert placement.replicas.min() == 1
    assert placement.moved.sum() >= 2
