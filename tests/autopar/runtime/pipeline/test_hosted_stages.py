"""Pipelines whose parameters lie on the host train as one device does, on processes."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime.pipeline.lanes import RealLane
from tests.autopar.planner.test_stage_hosting import Tied
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


def step_alike(
    ours: tuple[Any, torch.optim.Optimizer], single: tuple[nn.Module, torch.optim.Optimizer], inputs: tuple[Any, ...]
) -> None:
    """A step of a pipeline and one of its model, with clipping; gradients are compared."""
    (pmodel, own), (model, other) = ours, single
    for module, optimizer in (ours, single):
        optimizer.zero_grad()
        (4 * module(*inputs)).backward()
    for name, gradient in pmodel.full_gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-5, atol=1e-6)
    autopar.clip_grad_norm_(pmodel, 0.5)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    own.step()
    other.step()


def train(schedule: str, stages: int) -> tuple[int, int]:
    """Bytes promised of the device, and of the host."""
    mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), Layers()
    pmodel = autopar.compile(
        Layers(), mesh, example_inputs=batch(0), stages=stages, schedule=schedule, microbatches=4, constraints=HOST
    )
    own, other = (torch.optim.AdamW(it.parameters(), lr=1e-2) for it in (pmodel, model))
    for seed in range(3):
        rows = 16 if seed < 2 else 8  # the last batch is smaller: another program
        step_alike((pmodel, own), (model, other), batch(seed, rows))
    assert_same(pmodel, model)
    with torch.no_grad():
        torch.testing.assert_close(pmodel(*batch(9)), model(*batch(9)), rtol=1e-5, atol=1e-6)
    plan = cast(autopar.Plan, pmodel.plan)
    hosted = {entry.key for entry in plan.every_entry if entry.residency == "offload"}
    assert len(hosted) == len(list(model.parameters())) // 2
    return plan.peak_bytes, plan.host_bytes


def train_tied(schedule: str, stages: int, shape: tuple[int, ...]) -> None:
    mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp")[: len(shape)]), Tied()
    ids = [torch.randint(32, (8,), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    pmodel = autopar.compile(
        Tied(), mesh, example_inputs=ids[0], stages=stages, schedule=schedule, microbatches=4, constraints=HOST,
    )  # fmt: skip
    own, other = (torch.optim.AdamW(it.parameters(), lr=1e-2) for it in (pmodel, model))
    for seed in range(3):
        step_alike((pmodel, own), (model, other), (ids[seed],))
    assert_same(pmodel, model)
    with torch.no_grad():
        torch.testing.assert_close(pmodel(ids[3]), model(ids[3]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("interleaved", 4)])
def test_a_matrix_that_stages_share_is_trained(schedule: str, stages: int) -> None:
    run_on_ranks(train_tied, 2, schedule, stages, (2,))


def test_a_matrix_that_stages_of_replicas_share_is_trained() -> None:
    run_on_ranks(train_tied, 4, "zb-h1", 2, (2, 2))


def test_one_stage_on_each_rank_is_trained_and_both_promise_the_same() -> None:
    first, second = run_on_ranks(train, 2, "zb-h1", 2)
    assert first == second and first[1] > 0


def test_two_stages_on_each_rank_are_trained() -> None:
    run_on_ranks(train, 2, "interleaved", 4)


def own_step() -> None:
    mesh, model = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), Layers()
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    pmodel = autopar.compile(
        Layers(), mesh, example_inputs=batch(0), microbatches=4, schedule="1f1b", constraints=HOST, optimizer=adamw
    )
    other = adamw(model.parameters())
    for seed in range(3):
        other.zero_grad()
        loss = model(*batch(seed))
        loss.backward()
        other.step()
        torch.testing.assert_close(pmodel.train_step(*batch(seed)), loss.detach(), rtol=1e-5, atol=1e-6)
    assert_same(pmodel, model)


def test_the_step_that_owns_its_optimizers_trains_them_too() -> None:
    run_on_ranks(own_step, 2)


def save_and_load(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))

    def made(constraints: dict[str, str]) -> tuple[nn.Module, torch.optim.Optimizer]:
        pmodel = autopar.compile(
            Layers(),
            mesh,
            example_inputs=batch(0),
            microbatches=4,
            schedule="1f1b",
            search="ddp",
            constraints=constraints,
        )
        return pmodel, torch.optim.AdamW(pmodel.parameters(), lr=1e-2)

    def stepped(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> nn.Module:
        optimizer.zero_grad()
        module(*batch(seed)).backward()
        optimizer.step()
        return module

    alone = Layers()
    other = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    pmodel, optimizer = made(HOST)
    assert_same(stepped(pmodel, optimizer, 1), stepped(alone, other, 1))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)  # ranks have other parameters in their groups
    state, of_optimizer = get_state_dict(pmodel, optimizer, options=flat)
    dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder)
    elsewhere, _ = made({})  # its stages may be cut at other places
    state = elsewhere.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    elsewhere.load_state_dict(state)
    assert_same(elsewhere, alone)
    fresh, stepping = made(HOST)
    state, of_optimizer = get_state_dict(fresh, stepping, options=flat)
    dcp.load({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder)
    set_state_dict(fresh, stepping, model_state_dict=state, optim_state_dict=of_optimizer, options=flat)
    assert_same(stepped(fresh, stepping, 2), stepped(alone, other, 2))


def test_checkpoints_load_with_and_without_a_host() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(save_and_load, 2, folder)


def wait_for_copies() -> list[int]:
    """How often a rank waited for its copies in a call that computes no gradients: with parameters there, without."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), []
    for constraints in (HOST, {}):
        pmodel = autopar.compile(Layers(), mesh, example_inputs=batch(0), microbatches=2, constraints=constraints)
        with torch.no_grad(), mock.patch.object(RealLane, "settle_host") as waited:
            pmodel(*batch(1))
        found.append(waited.call_count)
    return found


def test_parameters_may_be_written_after_a_call_without_gradients() -> None:
    assert run_on_ranks(wait_for_copies, 2) == [[1, 0], [1, 0]]


def lie() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pmodel = autopar.compile(Layers(), mesh, example_inputs=batch(0), microbatches=2, constraints=HOST)
    return sorted(pmodel._session.hosted)


def test_each_rank_knows_what_lies_on_its_host() -> None:
    first, second = run_on_ranks(lie, 2)
    assert not set(first) & set(second)
    assert {*first, *second} == {f"layers.{number}.weight" for number in range(8)}
