"""Pipelines in one process: loss, every gradient and buffer are those of the single device, whatever the schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import NotDivisibleError, UnsupportedOptionError
from autopar.zoo.plain import make_plain
from tests.autopar.models import MODELS

ONE_LINE = autopar.Mesh((2,), ("pp",), hardware="cpu")


def check(name: str, mesh: autopar.Mesh, search: str = "ddp", **options: Any) -> autopar.Report:
    model, inputs = MODELS[name]() if name in MODELS else make_plain(name)
    report = autopar.verify(model, mesh, example_inputs=inputs, search=search, **options)
    assert report.ok, report.table
    return report


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_schedules_give_the_gradients_of_the_single_device(schedule: str) -> None:
    check("llama", ONE_LINE, schedule=schedule, microbatches=4)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_schedules_with_two_stages_on_a_rank(schedule: str) -> None:
    check("vit", ONE_LINE, schedule=schedule, stages=4, microbatches=4)


@pytest.mark.parametrize("name", ["t5", "unet"])
def test_values_that_skip_stages_and_parameters_that_stages_share(name: str) -> None:
    check(name, autopar.Mesh((4,), ("pp",), hardware="cpu"), schedule="1f1b", microbatches=2)


def test_microbatches_of_different_sizes() -> None:
    check("mlp", ONE_LINE, schedule="gpipe", microbatches=3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("mesh_shape", [(1,), (1, 2)], ids=["one device", "data parallel"])
def test_one_stage_accumulates_gradients(mesh_shape: tuple[int, ...], schedule: str) -> None:
    mesh = autopar.Mesh(mesh_shape, ("pp", "dp")[: len(mesh_shape)], hardware="cpu")
    report = check("gpt2", mesh, schedule=schedule, microbatches=2)
    assert report.plan is not None and len(report.plan.stages) == 1
    assert report.peak_bytes is not None and report.peak_bytes <= report.plan.peak_bytes


def test_an_axis_of_one_rank_without_microbatches_is_no_pipelines() -> None:
    mesh = autopar.Mesh((1, 2), ("pp", "dp"), hardware="cpu")
    model = nn.Linear(8, 8)
    assert autopar.make_plan(model, mesh, example_inputs=torch.ones(4, 8), search="ddp").pipeline is None
    with pytest.raises(UnsupportedOptionError, match="no axis of the mesh is one's"):
        autopar.make_plan(model, (2,), example_inputs=torch.ones(4, 8), microbatches=2)


def test_a_last_microbatch_that_the_ranks_of_a_stage_cannot_share_is_refused() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    square = autopar.Mesh((2, 2), ("pp", "dp"), hardware="cpu")
    for batch, microbatches in ((7, 4), (6, 4)):  # the first has two samples, the last has one
        with pytest.raises(NotDivisibleError, match="a later microbatch has 1 where the first has 2"):
            autopar.verify(model, square, example_inputs=torch.ones(batch, 8), search="ddp", microbatches=microbatches)


class Summed(nn.Module):
    """Beside its loss a sum over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, *, batch: dict[str, Any], scale: float) -> dict[str, Any]:
        found = self.layers(batch["x"][0]) * batch["mask"].unsqueeze(-1)
        return {"loss": (found.square().sum(-1) * batch["x"][1]).mean() * scale, "more": [found, (found.sum(),)]}


def test_nested_keyword_inputs_and_outputs_beside_the_loss_keep_to_the_planned_memory() -> None:
    inputs = {"batch": {"x": (torch.randn(8, 8), torch.rand(8)), "mask": torch.ones(8)}, "scale": 0.5}
    report = autopar.verify(Summed(), ONE_LINE, example_inputs=inputs, search="ddp", schedule="1f1b", microbatches=4)
    assert report.ok and report.plan is not None and report.peak_bytes is not None
    assert report.plan.peak_bytes >= report.peak_bytes


def test_one_microbatch_needs_no_cut_so_that_batch_norm_is_exact() -> None:
    check("resnet", ONE_LINE, schedule="gpipe", microbatches=1)


@pytest.mark.parametrize("search", ["ddp", "megatron", "fsdp"])
def test_stages_of_several_ranks_each(search: str) -> None:
    check("llama", autopar.Mesh((2, 2), ("pp", "dp"), hardware="cpu"), search, schedule="1f1b", microbatches=2)


def test_stage_data_and_tensor_parallel_on_sixteen_ranks() -> None:
    report = check(
        "llama", autopar.Mesh((2, 2, 4), ("pp", "dp", "tp"), hardware="cpu"), "megatron", stages=2, microbatches=2
    )
    assert report.plan is not None and [stage.rank for stage in report.plan.stages] == [0, 1]


def test_random_ops_draw_what_the_single_device_draws() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Dropout(0.5))]
    model = nn.Sequential(*layers).train()
    report = autopar.verify(model, ONE_LINE, example_inputs=torch.randn(8, 8), search="ddp", microbatches=4)
    assert report.ok, report.table
    assert "captured program" in report.reference


def test_without_a_named_axis_the_stages_say_which_axis_is_the_pipelines() -> None:
    model, inputs = MODELS["mlp"]()
    plan = autopar.make_plan(model, (4, 2), example_inputs=inputs, stages=2, microbatches=2, search="ddp")
    assert plan.pipeline is not None and plan.pipeline.axis == 1
    assert all(stage.plan.mesh_shape == (4,) for stage in plan.stages)
