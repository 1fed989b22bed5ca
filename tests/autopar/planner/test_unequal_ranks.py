"""A mesh of unequal ranks: the step is the slowest rank's, the memory the smallest rank's, also in what is chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cost_models.hardware import HardwareProfile, load_profile
from autopar.errors import HardwareProfileError
from autopar.planner.make import MEMORY_FRACTION

H100 = load_profile("h100")
SLOW = 0.02  # so slow that computation outweighs what communication saves


def planned(profile: HardwareProfile | str, **options: Any) -> autopar.Plan:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    mesh = autopar.Mesh((4,), hardware=profile)
    return autopar.make_plan(model, mesh, example_inputs=torch.randn(64, 256), **options)


def layouts(plan: autopar.Plan) -> list[tuple[str, str]]:
    return [(entry.key, str((entry.inputs, entry.outputs))) for entry in plan.every_entry]


@pytest.mark.parametrize("search", ["ddp", "ilp"])
def test_one_slow_rank_makes_a_plan_for_slow_ranks(search: str) -> None:
    unequal = planned(replace(H100, rank_speeds=(1.0, SLOW, 1.0)), search=search)
    all_slow = planned(replace(H100, device=H100.device.at_speed(SLOW)), search=search)
    assert unequal.step_s == pytest.approx(all_slow.step_s)
    assert unequal.step_s > planned(H100, search=search).step_s
    assert layouts(unequal) == layouts(all_slow)


def test_a_slow_rank_changes_what_is_chosen() -> None:
    """At full speed this model is not worth a collective; on slow ranks its products are."""
    assert layouts(planned(H100)) != layouts(planned(replace(H100, rank_speeds=(SLOW,))))


def test_the_smallest_rank_bounds_the_memory_of_all() -> None:
    whole = planned(H100, search="ddp").peak_bytes
    smallest = int(0.8 * whole / MEMORY_FRACTION)
    plan = planned(replace(H100, rank_memory_bytes=(80_000_000_000, smallest)))
    assert plan.peak_bytes <= smallest * MEMORY_FRACTION


def test_a_file_gives_the_ranks_and_a_base_for_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "mixed.json"
    speeds = [1.0, 1.0, 0.5, 0.5]
    path.write_text(json.dumps({"base": "h100", "name": "mixed", "rank_speeds": speeds, "device": {"launch_s": 1e-6}}))
    profile = load_profile(path)
    assert profile.rank_speeds == tuple(speeds)
    assert profile.device == replace(H100.device, launch_s=1e-6)
    assert profile.inter == H100.inter
    assert planned(str(path), search="ddp").step_s > planned(replace(profile, rank_speeds=()), search="ddp").step_s


def test_more_ranks_than_the_mesh_has_are_refused() -> None:
    with pytest.raises(HardwareProfileError, match=r"5 rank_speeds.*fewer ranks"):
        autopar.Mesh((4,), hardware=replace(H100, rank_speeds=(1.0,) * 5))
