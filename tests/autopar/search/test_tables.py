"""Flat arrays say what the network says; a sweep's levels keep its order."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.search.sweep import Sweep, block_order
from tests.autopar.search.test_forests import network_of, parts


def test_costs_and_usage_of_a_choice_are_those_of_the_network() -> None:
    network = network_of(30, 11, limit=22)
    pricing, tables, _ = parts(network, 2)
    random = np.random.default_rng(0)
    for _ in range(20):
        positions = random.integers(0, 3, 30)
        located = dict(zip(pricing.nodes, positions.tolist(), strict=True))
        expected, found = network.cost_of(located), tables.cost(pricing, positions)
        assert found == expected if math.isfinite(expected) else found >= tables.forbidden
        assert (pricing.usage(positions) == network.usage_of(located)).all()


def test_prices_add_what_each_strategy_uses() -> None:
    network = network_of(12, 1, limit=20)
    pricing, _, _ = parts(network, 1)
    prices = np.random.default_rng(2).integers(0, 5, len(pricing.capacity)).astype(float)
    priced = pricing.split(pricing.priced(prices) - pricing.unary)
    for node, added in zip(pricing.nodes, priced, strict=True):
        for position in range(network.size(node)):
            usage = network.usage_of_nodes([node], {node: position})
            assert added[position] == pytest.approx(float(usage @ prices))


@pytest.mark.parametrize("blocks", [1, 3, 7])
def test_arcs_of_a_sweep_lead_to_higher_levels(blocks: int) -> None:
    network = network_of(40, 2)
    pricing, tables, _ = parts(network, 1)
    sweep = Sweep(tables, len(pricing.nodes), blocks)
    assert len(sweep.arcs) == tables.edges
    assert (sweep.level[tables.tail[sweep.arcs]] < sweep.level[tables.head[sweep.arcs]]).all()
    assert sorted(sweep.places.tolist()) == list(range(40))


def test_blocks_are_walked_side_by_side_every_second_one_from_its_end() -> None:
    assert block_order(6, 2).tolist() == [0, 5, 1, 4, 2, 3]
    assert block_order(3, 9).tolist() == [0, 1, 2]
