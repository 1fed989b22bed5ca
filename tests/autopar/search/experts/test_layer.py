from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.experts.balance import Balancer, device_loads, greedy_slots, slowest
from autopar.search.experts.bound import load_bound
from autopar.search.experts.exact import part_of, solve_part, whole_layer
from autopar.search.experts.layer import Effort, balance_layer
from tests.autopar.search.experts.loads import Array, all_placements, slowest_by_loops, zipf_load

shapes = st.sampled_from([(3, 2, 2), (4, 2, 2), (4, 2, 3), (5, 2, 3), (3, 3, 1), (4, 3, 2), (2, 3, 2), (1, 2, 2)])


def effort(solver: float = 2.0) -> Effort:
    return Effort(solver, time.monotonic() + 60)


def loads_of(data: st.DataObject, experts: int) -> Array:
    whole = st.integers(0, 100).map(float)
    real = st.floats(0, 1, allow_subnormal=False)
    return np.array(data.draw(st.lists(st.one_of(whole, real), min_size=experts, max_size=experts)))


@settings(max_examples=40)
@given(shapes, st.data())
def test_small_layers_are_as_good_as_brute_force(shape: tuple[int, int, int], data: st.DataObject) -> None:
    experts, devices, slots = shape
    load = loads_of(data, experts)
    found, bound = balance_layer(load, devices, slots, effort(), 0)
    best = min(slowest_by_loops(load, placement) for placement in all_placements(*shape))
    assert len(np.unique(found)) == experts
    assert slowest_by_loops(load, found) == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert bound == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert bound <= best * (1 + 1e-12)


@settings(max_examples=40)
@given(shapes, st.data())
def test_bounds_are_below_brute_force(shape: tuple[int, int, int], data: st.DataObject) -> None:
    load = loads_of(data, shape[0])
    best = min(slowest_by_loops(load, placement) for placement in all_placements(*shape))
    assert load_bound(load, *shape[1:]) <= best * (1 + 1e-12)


@given(
    st.sampled_from([(16, 4, 5), (24, 8, 4), (32, 4, 9), (12, 3, 4), (40, 8, 10)]),
    st.floats(0, 1.5),
    st.integers(0, 1000),
)
@settings(max_examples=25)
def test_every_move_takes_load_off_and_keeps_every_expert(
    shape: tuple[int, int, int], exponent: float, seed: int
) -> None:
    experts, devices, slots = shape
    load = zipf_load(experts, exponent, seed)
    for sparing in (False, True):
        balancer = Balancer(load, greedy_slots(load, devices, slots))
        before = sorted(balancer.loads, reverse=True)
        while balancer.step_sparingly() if sparing else balancer.step():
            after = sorted(balancer.loads, reverse=True)
            assert after < before
            before = after
            np.testing.assert_allclose(balancer.loads, device_loads(load, balancer.slots))
            assert len(np.unique(balancer.slots)) == experts
        assert balancer.top() <= slowest(load, greedy_slots(load, devices, slots))


@pytest.mark.parametrize("devices", [[0, 1], [0, 2, 3]])
def test_a_part_dealt_out_anew_leaves_what_stands_elsewhere(devices: list[int]) -> None:
    load = zipf_load(8, 1.0, 3)
    slots = greedy_slots(load, 4, 3)
    part, experts = part_of(load, slots, np.array(devices))
    answer = solve_part(part, effort=2.0, time_limit_s=60)
    assert answer.slots is not None
    tried = slots.copy()
    tried[devices] = experts[answer.slots]
    before, after = device_loads(load, slots), device_loads(load, tried)
    others = [device for device in range(4) if device not in devices]
    np.testing.assert_allclose(after[others], before[others])
    assert after[devices].max() <= before[devices].max()
    assert answer.bound <= after[devices].max() * (1 + 1e-12)


def test_what_the_integer_program_is_cut_short_at_is_the_same_on_every_run() -> None:
    load = zipf_load(20, 0.8, 1)
    found = [balance_layer(load, 8, 3, Effort(0.2, time.monotonic() + 600), 0) for _ in range(2)]
    assert np.array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_the_program_of_a_whole_layer_proves_its_optimum() -> None:
    load = np.array([10.0, 7, 5, 3, 1])
    answer = solve_part(whole_layer(load, greedy_slots(load, 2, 3)), effort=5.0, time_limit_s=60)
    assert answer.slots is not None
    assert slowest(load, answer.slots) == pytest.approx(answer.bound) == pytest.approx(13.0)
