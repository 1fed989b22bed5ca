"""What a layer of experts keeps of its forward for its backward: a choice of the plan, by memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.errors import ConstraintError
from tests.autopar.test_expert_plans import EXPERTS, tokens, transformer

BACKWARD = "*/autopar.experts_backward*"


def planned(mesh: tuple[int, ...], layout: str, **options: Any) -> autopar.Plan:
    pins = {EXPERTS: layout}
    return autopar.make_plan(transformer("sigmoid"), mesh, example_inputs=tokens(), constraints=pins, **options)


def backward_of(plan: autopar.Plan) -> str:
    """The word for what the backward of the one layer reads."""
    (entry,) = plan.matching(BACKWARD)
    return entry.residency


@pytest.mark.parametrize(
    ("mesh", "layout"), [((4,), "A"), ((2, 2), "S0,A"), ((2, 2), "A,I"), ((2,), "S0"), ((4,), "R")]
)
@pytest.mark.parametrize("word", ["keep", "recompute"])
def test_the_backward_reads_what_the_forward_kept_or_computes_it_again(
    mesh: tuple[int, ...], layout: str, word: str
) -> None:
    constraints = [(EXPERTS, layout), (BACKWARD, word)]
    model = transformer("sigmoid")
    report = autopar.verify(model, mesh, example_inputs=tokens(), constraints=constraints)
    assert report.ok and report.worst_relative_error < 1e-10, report.table
    code = autopar.make_plan(model, mesh, example_inputs=tokens(), constraints=constraints).details
    assert code is not None
    emitted = code.code["forward"] + code.code["backward"]
    assert ("experts_keeping" in emitted, "experts_backward_kept" in emitted) == (word == "keep",) * 2


def test_what_was_kept_is_not_sent_again() -> None:
    sent = {}
    for word in ("keep", "recompute"):
        plan = autopar.make_plan(
            transformer("sigmoid"), (4,), example_inputs=tokens(), constraints=[(EXPERTS, "A"), (BACKWARD, word)]
        )
        assert plan.details is not None
        lines = plan.details.code["backward"].splitlines()
        line = next(line for line in lines if "pack_rows" in line)  # the way there
        sent[word] = line.partition("[")[2].partition("]")[0].count(",") + 1
    assert sent == {"keep": 1, "recompute": 4}  # the gradient; tokens, choices and scores beside it


def test_memory_decides_and_a_saved_plan_says_so(tmp_path: Path) -> None:
    free = planned((4,), "A")
    tight = planned((4,), "A", memory_limit_bytes=free.peak_bytes - 1)
    assert backward_of(free) in ("", "keep")
    again = autopar.make_plan(
        transformer("sigmoid"), (4,), example_inputs=tokens(), constraints=[(EXPERTS, "A"), (BACKWARD, "recompute")]
    )
    assert backward_of(again) == "recompute" and again.step_s > free.step_s and tight.peak_bytes < free.peak_bytes
    again.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.hash == again.hash != free.hash
    resolved = autopar.make_plan(transformer("sigmoid"), (4,), example_inputs=tokens(), plan=loaded)
    assert resolved.hash == again.hash and resolved.peak_bytes == again.peak_bytes


def test_other_ops_of_the_backward_cannot_be_pinned() -> None:
    with pytest.raises(ConstraintError, match="no op of the forward"):
        autopar.make_plan(
            transformer("sigmoid"), (2,), example_inputs=tokens(), constraints={"head/mm.backward#0": "recompute"}
        )
