"""The predicted memory of an emitted program is the measured one."""

from __future__ import annotations

import pytest

from autopar.planner.liveness import predicted_timeline
from autopar.runtime.memory_tracker import LockstepMemory
from tests.passes.assignments import random_assignment
from tests.passes.programs import captured
from tests.passes.running import Step, emit_all


@pytest.mark.parametrize(
    ("name", "mesh_shape"), [("mlp", (3,)), ("mlp", (2, 2)), ("transformer", (2,)), ("convnet", (2, 2))], ids=str
)
def test_the_predicted_peak_is_the_measured_peak(name: str, mesh_shape: tuple[int, ...]) -> None:
    """Never below what is measured, and never more than 5 % above."""
    model, inputs, program = captured(name)
    assignment = random_assignment(program, mesh_shape, seed=10)
    programs = emit_all(program, assignment)
    memory = LockstepMemory(len(programs))
    Step(model, inputs, programs, assignment).run(memory)
    for local, measured in zip(programs, memory.peak_bytes, strict=True):
        predicted = predicted_timeline(local).peak_bytes
        assert measured <= predicted <= 1.05 * measured


def test_the_kinds_at_the_peak_sum_to_the_peak() -> None:
    _, _, program = captured("mlp")
    (local, *_) = emit_all(program, random_assignment(program, (2,), 0))
    timeline = predicted_timeline(local)
    assert sum(timeline.peak_by_kind().values()) == timeline.peak_bytes
    assert len(timeline.totals) == len(timeline.nodes)
    assert 0 < timeline.backward_start < len(timeline.nodes)
