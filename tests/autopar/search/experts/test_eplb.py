from __future__ import annotations

import numpy as np
import pytest

from autopar.search.experts.balance import device_loads
from autopar.search.experts.eplb import global_placement, hierarchical_placement, packed, replica_counts
from tests.autopar.search.experts.loads import EPLB_DEVICE_LOAD, EPLB_IMBALANCE, EPLB_LOAD


@pytest.mark.parametrize("layer", [0, 1])
def test_the_heuristic_gives_the_published_loads_of_the_published_example(layer: int) -> None:
    load = np.array(EPLB_LOAD[layer], dtype=float)
    loads = device_loads(load, hierarchical_placement(load, groups=4, nodes=2, devices=8, slots=2))
    assert loads.tolist() == EPLB_DEVICE_LOAD[layer]
    assert loads.max() / loads.mean() == pytest.approx(EPLB_IMBALANCE[layer], abs=1e-4)


def test_replicas_go_to_the_most_loaded_expert_one_by_one() -> None:
    assert replica_counts(np.array([90.0, 10.0, 40.0]), 6).tolist() == [3, 1, 2]


def test_packs_have_equally_many_items() -> None:
    pack_of = packed(np.array([9.0, 1, 1, 1, 1, 1]), 2)
    assert np.bincount(pack_of).tolist() == [3, 3]


def test_the_global_placement_gives_every_expert_a_slot() -> None:
    slots = global_placement(np.array([5.0, 0, 0, 0]), 3, 2)
    assert set(slots.ravel().tolist()) == {0, 1, 2, 3}
