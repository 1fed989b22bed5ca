"""Devices without a mesh: the shapes that suit the hardware are tried, and the fastest is planned."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import MemoryLimitError, MeshError
from autopar.planner.mesh_shapes import mesh_shapes, meshes_of


def test_inner_axes_stay_inside_nodes() -> None:
    assert mesh_shapes(16, 8) == ((16,), (8, 2), (4, 4), (2, 8))
    assert mesh_shapes(12, 4) == ((12,), (6, 2), (3, 4))
    assert mesh_shapes(7, 7) == ((7,),)
    assert [mesh.shape for mesh in meshes_of(autopar.Devices(4))] == [(4,), (2, 2)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))


def test_the_plan_is_that_of_the_fastest_mesh_and_the_frontier_that_of_all() -> None:
    x = torch.randn(4, 64)
    alone = {
        shape: autopar.make_plan(model(), autopar.Mesh(shape, hardware="h100"), example_inputs=x)
        for shape in ((4,), (2, 2))
    }
    plan = autopar.make_plan(model(), autopar.Devices(4, hardware="h100"), example_inputs=x)
    fastest = min(alone.values(), key=lambda item: item.step_s)
    assert plan.mesh_shape == fastest.mesh_shape and plan.hash == fastest.hash
    assert [item.mesh_shape for item in plan.other_meshes] == [shape for shape in alone if shape != plan.mesh_shape]
    for own in alone.values():
        for bytes_, seconds in own.frontier:
            assert any(held <= bytes_ and cost <= seconds * (1 + 1e-9) for held, cost in plan.frontier)


def test_where_no_mesh_fits_the_error_is_that_of_the_memory() -> None:
    with pytest.raises(MemoryLimitError):
        autopar.make_plan(model(), autopar.Devices(4), example_inputs=torch.randn(4, 64), memory_limit_bytes=1000)
    with pytest.raises(MeshError, match="are none"):
        autopar.Devices(0)
