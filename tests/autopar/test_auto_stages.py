"""`stages="auto"`: the mesh's first axis is divided into stages and the rest as is fastest by the plans."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import autopar
from autopar.auto_stages import meshes
from autopar.errors import UnsupportedOptionError


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def test_every_division_of_the_first_axis_keeps_the_ranks_where_they_are() -> None:
    found = [(mesh.axis_names, mesh.shape) for mesh in meshes(autopar.Mesh((4, 2), ("node", "gpu")))]
    assert found == [
        (("node", "gpu"), (4, 2)),
        (("pp", "node", "gpu"), (2, 2, 2)),
        (("pp", "gpu"), (4, 2)),
    ]
    divided = autopar.Mesh((2, 4), ("pp", "dp"))
    assert meshes(divided) == [divided]
    assert all(math.prod(shape) == 8 for _, shape in found)


def test_the_plan_is_the_fastest_of_all_divisions_and_runs() -> None:
    x, mesh = torch.randn(8, 16), autopar.Mesh((2,), ("dp",), hardware="cpu")
    plan = autopar.make_plan(layers(), mesh, example_inputs=x, search="ddp", stages="auto")
    apart = [
        autopar.make_plan(layers(), each, example_inputs=x, search="ddp").step_s
        for each in (mesh, autopar.Mesh((2,), ("pp",), hardware="cpu"))
    ]
    assert plan.step_s == pytest.approx(min(apart))
    assert {"dp 2", "pp 2"} <= plan.alternatives.keys()
    report = autopar.verify(layers(), mesh, example_inputs=x, search="ddp", stages="auto")
    assert report.ok and report.plan is not None and report.plan.mesh_shape == plan.mesh_shape


def test_what_fits_only_in_stages_becomes_stages() -> None:
    x, mesh = torch.randn(8, 16), autopar.Mesh((2,), ("dp",), hardware="cpu")
    alone = autopar.make_plan(layers(), mesh, example_inputs=x, search="ddp")
    limit = int(0.75 * alone.peak_bytes)  # of the four layers' parameters and gradients two are left: a half, and more
    plan = autopar.make_plan(layers(), mesh, example_inputs=x, search="ddp", stages="auto", memory_limit_bytes=limit)
    assert plan.axis_names == ("pp",) and len(plan.stages) == 2 and plan.peak_bytes <= limit


def test_a_plan_to_follow_leaves_nothing_to_choose() -> None:
    x, mesh = torch.randn(8, 16), autopar.Mesh((2,), ("dp",), hardware="cpu")
    plan = autopar.make_plan(layers(), mesh, example_inputs=x, search="ddp")
    with pytest.raises(UnsupportedOptionError, match="follows no plan"):
        autopar.run_virtual(layers(), mesh, example_inputs=x, plan=plan, stages="auto")
