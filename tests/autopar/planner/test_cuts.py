"""Cuts: the best of all by brute force; slow devices get fewer layers, small ones no more than they can hold."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.cost_models.hardware import load_profile
from autopar.errors import MemoryLimitError, PlanError
from autopar.planner.cuts import Places, balanced_cuts


@pytest.mark.parametrize("seed", range(20))
def test_cuts_are_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    count, stages = int(random.integers(4, 9)), int(random.integers(2, 4))
    speeds = list(random.uniform(0.5, 1.5, stages))
    found = Places(
        cuts=tuple(range(10, 10 * count, 10)),
        seconds=random.integers(1, 9, count).astype(float),
        sent_bytes=random.integers(1, 9, count - 1).astype(float),
        readers=random.integers(0, 2, count),
    )
    best = None
    for ends in itertools.combinations(range(1, count), stages - 1):
        edges = (0, *ends, count)
        spans = [slice(*pair) for pair in itertools.pairwise(edges)]
        if all(found.readers[span].sum() for span in spans):
            slowest = max(found.seconds[span].sum() / speed for span, speed in zip(spans, speeds, strict=True))
            value = slowest, sum(found.sent_bytes[end - 1] for end in ends)
            best = value if best is None else min(best, value)
    if best is None:
        with pytest.raises(PlanError):
            balanced_cuts(found, stages, speeds)
        return
    ends = [cut // 10 for cut in balanced_cuts(found, stages, speeds)]
    spans = [slice(*pair) for pair in itertools.pairwise((0, *ends, count))]
    slowest = max(found.seconds[span].sum() / speed for span, speed in zip(spans, speeds, strict=True))
    assert (slowest, sum(found.sent_bytes[end - 1] for end in ends)) == pytest.approx(best)


def layers() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), torch.randn(16, 64)


def test_a_slow_device_gets_fewer_layers() -> None:
    model, x = layers()
    profile = replace(load_profile("h100"), rank_speeds=(0.25, 1.0))
    slow, alike = autopar.Mesh((2,), ("pp",), hardware=profile), autopar.Mesh((2,), ("pp",))
    plan = autopar.make_plan(model, slow, example_inputs=x, stages=2, microbatches=4)
    first, second = (len(stage.parameters) for stage in plan.stages)
    assert 0 < first <= second / 2
    even = autopar.make_plan(model, alike, example_inputs=x, stages=2, microbatches=4)
    assert [len(stage.parameters) for stage in even.stages] == [8, 8]


def test_the_memory_of_a_rank_counts_all_microbatches_in_flight() -> None:
    model, x = layers()
    mesh = autopar.Mesh((2,), ("pp",))
    free = autopar.make_plan(model, mesh, example_inputs=x, schedule="gpipe", microbatches=4)
    assert [stage.in_flight for stage in free.stages] == [4, 4]
    limited = autopar.make_plan(
        model, mesh, example_inputs=x, schedule="gpipe", microbatches=4, memory_limit_bytes=free.peak_bytes
    )
    assert limited.peak_bytes <= free.peak_bytes
    with pytest.raises(MemoryLimitError):
        autopar.make_plan(
            model, mesh, example_inputs=x, schedule="gpipe", microbatches=4, memory_limit_bytes=free.peak_bytes // 4
        )


def test_a_plan_with_stages_is_saved_read_and_followed(tmp_path: object) -> None:
    model, x = layers()
    mesh = autopar.Mesh((2, 2), ("pp", "dp"))
    plan = autopar.make_plan(model, mesh, example_inputs=x, schedule="zb-h1", microbatches=2)
    plan.save(f"{tmp_path}/plan.json")
    again = autopar.make_plan(model, mesh, example_inputs=x, plan=f"{tmp_path}/plan.json")
    assert again.hash == plan.hash and again.pipeline == plan.pipeline
    assert "zb-h1" in str(plan) and "2 stages" in str(plan)
    with pytest.raises(PlanError, match="mesh"):
        autopar.make_plan(model, autopar.Mesh((2, 4), ("pp", "dp")), example_inputs=x, plan=plan)
