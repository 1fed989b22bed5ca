"""Updates and sums of gradients happen once a step: a microbatch bears its share of them, a step the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.arguments import make_options
from autopar.capture.trace import capture
from autopar.planner.make import Planned, plan_program

COUNT = 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])


def of_a_step(microbatches: int) -> Planned:
    """One of so many microbatches, planned."""
    options = make_options("ddp", None, torch.optim.AdamW, (), None)
    mesh = autopar.Mesh((2,), ("dp",), hardware="h100")
    return plan_program(capture(model(), (torch.ones(8, 64),), {}), mesh, replace(options, microbatches=microbatches))


def in_stages() -> autopar.Plan:
    return autopar.make_plan(
        model(), autopar.Mesh((2,), ("pp",), hardware="h100"), example_inputs=torch.ones(8, 64),
        optimizer=torch.optim.AdamW, schedule="gpipe", microbatches=COUNT,
    )  # fmt: skip


def seconds(planned: Planned, kind: str, name: str = "") -> float:
    assert planned.plan.step_ops is not None
    return sum(op.seconds for op in planned.plan.step_ops.ops if op.kind == kind and op.name.startswith(name))


def test_a_microbatch_bears_its_share_of_updates_and_sums_and_all_of_the_rest() -> None:
    whole, share = of_a_step(1), of_a_step(COUNT)
    for kind, name in (("compute", "update "), ("communication", "all_reduce")):
        assert seconds(whole, kind, name) > 0
        assert seconds(share, kind, name) == pytest.approx(seconds(whole, kind, name) / COUNT)
    assert seconds(share, "compute", "addmm") == pytest.approx(seconds(whole, "compute", "addmm"))


def test_a_parameter_bears_its_share_in_the_search() -> None:
    whole, share = (of_a_step(count).plan.matching("0.weight")[0] for count in (1, COUNT))
    assert whole.seconds > 0 and share.seconds == pytest.approx(whole.seconds / COUNT)


def test_a_step_of_a_pipeline_has_the_whole_update_of_its_slowest_stage() -> None:
    plan = in_stages()
    assert plan.details is not None
    updates = of_a_step(1)  # of all layers, on every rank: half of them lie on a stage
    last_s = max(bar.end_s for bar in plan.details.chart)
    assert plan.step_s - last_s == pytest.approx(seconds(updates, "compute", "update ") / 2)


def test_the_formula_of_an_update_says_the_share() -> None:
    (explained,) = in_stages().explanations("0.weight")
    assert f"{1 / COUNT} times memory-bound op" in explained.formulas[0]
