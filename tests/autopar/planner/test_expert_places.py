"""What copies of experts add to a plan's peak: counted op by op, and refused beyond the limit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.arguments import make_options
from autopar.capture.trace import capture
from autopar.errors import MemoryLimitError
from autopar.mesh import Mesh
from autopar.passes.copy_experts import with_places
from autopar.passes.expert_places import ExpertPlaces
from autopar.plan_entries import Pipeline
from autopar.planner.expert_places import bytes_of_copies
from autopar.planner.liveness import predicted_timeline
from autopar.planner.make import plan_program
from tests.passes.running import emit_all
from tests.passes.test_copy_experts import Even


def test_what_copies_add_is_told_and_refused_beyond_the_limit() -> None:
    program = capture(Even(), (torch.randn(32, 8),), {})
    options = make_options("ilp", None, None, {"*/autopar.experts*": "A"}, None, None)
    planned = plan_program(program, Mesh((4,)), options)
    local = emit_all(program, planned.assignment)[0]
    computed = ((0, 1, 2, 3), (2, 3, 4, 5), (4, 5, 6, 7), (0, 1, 6, 7))
    copied = with_places(local, {"experts": ExpertPlaces(tuple(range(8)), computed, (0,))})
    before, after = predicted_timeline(local), predicted_timeline(copied)
    more = bytes_of_copies(planned.plan, local, copied)
    assert more == after.peak_bytes - before.peak_bytes > 0
    tight = replace(planned.plan, memory_limit_bytes=planned.plan.peak_bytes + more)
    assert bytes_of_copies(tight, local, copied) == more
    with pytest.raises(MemoryLimitError, match=f"copies of experts take {more:,} bytes more"):
        bytes_of_copies(replace(tight, memory_limit_bytes=planned.plan.peak_bytes + more - 1), local, copied)
    staged = replace(planned.plan, pipeline=Pipeline(0, "1f1b", 2))
    phases = slice(before.backward_start), slice(before.backward_start, None)
    later = slice(after.backward_start), slice(after.backward_start, None)
    rises = [max(after.totals[late]) - max(before.totals[early]) for early, late in zip(phases, later, strict=True)]
    assert bytes_of_copies(staged, local, copied) == max(rises) >= more
