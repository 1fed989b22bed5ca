"""The promised models on virtual meshes of eight ranks: every search, loss, gradients, buffers and memory."""

from __future__ import annotations

import copy

import pytest
import torch

import autopar
from autopar.errors import PlanError
from tests.autopar.models import MODELS, Made

MESHES = {
    "gpt2": (2, 4),
    "llama": (2, 2, 2),
    "bert": (8,),
    "t5": (2, 4),
    "vit": (2, 2, 2),
    "resnet": (2, 4),
    "mlp": (8,),
}


def check(made: Made, mesh_shape: tuple[int, ...], search: str, memory_limit_bytes: int | None = None) -> autopar.Plan:
    model, inputs = made
    mesh = autopar.Mesh(mesh_shape, hardware="cpu")
    report = autopar.verify(model, mesh, example_inputs=inputs, search=search, memory_limit_bytes=memory_limit_bytes)
    assert report.ok, report.table
    assert report.plan is not None and report.peak_bytes is not None
    assert 0.8 * report.plan.peak_bytes <= report.peak_bytes <= report.plan.peak_bytes
    return report.plan


@pytest.mark.slow
@pytest.mark.parametrize("search", ["ilp", "ddp", "fsdp", "megatron"])
@pytest.mark.parametrize("name", MODELS)
def test_eight_virtual_ranks_compute_what_one_device_computes(name: str, search: str) -> None:
    check(MODELS[name](), MESHES[name], search)


@pytest.mark.parametrize("name", ["llama", "vit", "mlp"])
def test_under_a_memory_limit_the_search_shards_and_stays_right_and_within_it(name: str) -> None:
    made = MODELS[name]()
    mesh = autopar.Mesh((2, 2), hardware="cpu")
    free = autopar.make_plan(made[0], mesh, example_inputs=made[1])
    limit = int(0.6 * free.peak_bytes)
    plan = check(made, (2, 2), "ilp", limit)
    assert plan.peak_bytes <= limit
    assert plan.step_s >= free.step_s


@pytest.mark.parametrize("name", ["llama", "resnet"])
def test_float64_agrees_to_ten_digits(name: str) -> None:
    model, inputs = MODELS[name]()
    assert isinstance(inputs, dict)
    double = {key: item.double() if item.is_floating_point() else item for key, item in inputs.items()}
    check((copy.deepcopy(model).double(), double), (2, 2), "fsdp")


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit", "mlp"])
def test_the_search_is_never_predicted_slower_than_a_hand_plan(name: str) -> None:
    model, inputs = MODELS[name]()
    for hardware in ("cpu", "h100"):
        mesh = autopar.Mesh((2, 2), hardware=hardware)
        best = autopar.make_plan(model, mesh, example_inputs=inputs)
        assert best.gap < 0.01
        for search in ("ddp", "fsdp", "megatron"):
            try:
                hand = autopar.make_plan(model, mesh, example_inputs=inputs, search=search)
            except PlanError:
                continue
            assert hand.search == search and best.step_s <= hand.step_s * (1 + 1e-9)


def test_a_random_model_draws_the_numbers_of_the_single_device() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4))
    for search in ("ddp", "megatron"):
        report = autopar.verify(model, (2, 2), example_inputs=torch.randn(8, 8), search=search)
        assert report.ok, report.table
        assert "captured program" in report.reference
