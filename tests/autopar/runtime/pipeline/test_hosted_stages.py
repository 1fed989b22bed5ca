"""Pipelines whose parameters lie on the host train as one device does, on processes."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from tests.autopar.planner.test_stage_memory import Layers
from tests.gloo import run_on_ranks

HOST = {"*.weight": "offload"}


def batch(seed: int, rows: int = 16) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 24, generator=source), torch.randn(rows, 24, generator=source)


def assert_same(pmodel: nn.Module, model: nn.Module) -> None:
    for name, parameter in pmodel.named_parameters():
        full = cast(DTensor, parameter.detach()).full_tensor()
        torch.testing.assert_close(full, model.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


def train(schedule: str, stages: int) -> tuple[int, int]:
    """Bytes promised of the device, and of the host."""
    mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), Layers()
    pmodel = autopar.compile(
        Layers(), mesh, example_inputs=batch(0), stages=stages, schedule=schedule, microbatches=4, constraints=HOST
    )
    own, other = (torch.optim.AdamW(it.parameters(), lr=1e-2) for it in (pmodel, model))
    for seed in range(3):
        rows = 16 if seed < 2 else 8  # the last batch is smaller: another program
        for module, optimizer in ((pmodel, own), (model, other)):
            optimizer.zero_grad()
            (4 * module(*batch(seed, rows))).backward()
        for name, gradient in pmodel.full_gradients().items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-5, atol=1e-6)
        autopar.clip_grad_norm_(pmodel, 0.5)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        own.step()
        other.step()
    assert_same(pmodel, model)
    with torch.no_grad():
        torch.testing.assert_close(pmodel(*batch(9)), model(*batch(9)), rtol=1e-5, atol=1e-6)
    plan = cast(autopar.Plan, pmodel.plan)
    hosted = {entry.key for entry in plan.every_entry if entry.residency == "offload"}
    assert len(hosted) == len(list(model.parameters())) // 2
    return plan.peak_bytes, plan.host_bytes


def test_one_stage_on_each_rank() -> None:
    first, second = run_on_ranks(train, 2, "zb-h1", 2)
    assert first == second and first[1] > 0


def test_two_stages_on_each_rank() -> None:
    run_on_ranks(train, 2, "interleaved", 4)


def lie() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pmodel = autopar.compile(Layers(), mesh, example_inputs=batch(0), microbatches=2, constraints=HOST)
    return sorted(pmodel._session.hosted)  # type: ignore[attr-defined]


def test_each_rank_knows_what_lies_on_its_host() -> None:
    first, second = run_on_ranks(lie, 2)
    assert not set(first) & set(second)
    assert {*first, *second} == {f"layers.{number}.weight" for number in range(8)}
