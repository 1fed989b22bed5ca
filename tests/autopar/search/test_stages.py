"""The stage search chooses mesh, microbatches, cuts and schedule, and is never worse than even splitting."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleProblemError
from autopar.search.stage_problem import best_even_cut
from autopar.search.stages import (
    SCHEDULES,
    Cluster,
    DeviceKind,
    Layer,
    Level,
    make_problem,
    search_stages,
    simulated_step_seconds,
)


def layer(work_s: float = 8.0, **changed: float) -> Layer:
    numbers = {"parameter_bytes": 1.0, "state_bytes": 8.0, "activation_bytes": 8.0, "output_bytes": 8.0} | changed
    return Layer("layer", work_s, **numbers)


def cluster(count: int = 4, memory_bytes: float = 1e9, bytes_per_s: float = 1e3) -> Cluster:
    return Cluster((DeviceKind("gpu", count, memory_bytes),), (Level(2, bytes_per_s), Level(64, bytes_per_s / 10)))


@settings(max_examples=10)
@given(st.lists(st.floats(1, 9), min_size=4, max_size=8), st.sampled_from([40.0, 90.0, 1e9]))
def test_the_choice_is_never_worse_than_an_even_cut_of_its_mesh(works: list[float], memory_bytes: float) -> None:
    layers, machines = [layer(work) for work in works], cluster(memory_bytes=memory_bytes)
    try:
        choice = search_stages(layers, machines, batch=8)
    except InfeasibleProblemError:
        return
    problem = make_problem(layers, machines, (choice.tensor_parallel, choice.data_parallel, choice.microbatches))
    even = best_even_cut(problem)
    for name in SCHEDULES if even else ():
        assert even is not None
        step_s = simulated_step_seconds(problem, even[0], name)
        assert step_s is None or choice.step_s <= step_s


def test_large_parameters_and_slow_links_are_cut_into_stages_and_small_ones_replicated() -> None:
    heavy = search_stages([layer(parameter_bytes=1e5)] * 8, cluster(), batch=16)
    light = search_stages(
        [layer(parameter_bytes=0.0, output_bytes=1e4, tensor_parallel_bytes=1e4)] * 8, cluster(), batch=16
    )
    assert (heavy.data_parallel, len(heavy.cut.ends)) == (1, 4)
    assert (light.data_parallel, len(light.cut.ends)) == (4, 1)


def test_memory_decides_the_schedule() -> None:
    """Stages of 16 bytes, and 2 for each of 4 microbatches in flight: 7 of them do not fit."""
    layers = [layer(parameter_bytes=1e6, tensor_parallel_bytes=1e6)] * 8
    roomy = search_stages(layers, cluster(), batch=8)
    tight = search_stages(layers, cluster(memory_bytes=25.0), batch=8)
    assert roomy.schedule == "zb-h2"
    assert tight.schedule == "zb-h1"
    assert roomy.step_s < tight.step_s


def test_a_faster_kind_gets_more_layers() -> None:
    machines = Cluster((DeviceKind("new", 1, 1e9, speed=3.0), DeviceKind("old", 1, 1e9)), (Level(2, 1e9),))
    choice = search_stages([layer(parameter_bytes=1e12)] * 8, machines, batch=32)
    first, second = choice.cut.ends[0], 8 - choice.cut.ends[0]
    assert {first, second} == {2, 6}


def test_what_no_mesh_holds_is_refused() -> None:
    with pytest.raises(InfeasibleProblemError, match="no mesh of 4 devices holds these 3 layers"):
        search_stages([layer(state_bytes=1e4)] * 3, cluster(memory_bytes=10.0), batch=4)
