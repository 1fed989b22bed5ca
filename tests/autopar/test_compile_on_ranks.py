"""What a user does with a compiled model besides training it: checkpoints, edited plans, accumulation, clipping."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import autopar
from autopar.planner.decisions import DecisionList
from tests.autopar.models import mlp, vit
from tests.autopar.parity import adam, full, loss_of
from tests.gloo import run_on_ranks

WEIGHTS = "[0,2,4].weight"  # of the MLP, as a plan folds them


def batch(rows: int = 8, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))


def step(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    loss_of(module, (batch(seed=seed),)).backward()
    optimizer.step()


def assert_same_parameters(module: nn.Module, reference: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(full(parameter), reference.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


def save(folder: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    pmodel = autopar.compile(mlp()[0], mesh, example_inputs=batch(), search="megatron")
    optimizer = adam(pmodel)
    step(pmodel, optimizer, 1)
    state, optimizer_state = get_state_dict(pmodel, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load(folder: str, mesh_shape: tuple[int, ...], search: str) -> None:
    """Load into another model, laid out otherwise, and go on beside one device that never stopped."""
    model = mlp()[0]
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    mesh = init_device_mesh("cpu", mesh_shape)
    pmodel = autopar.compile(model, mesh, example_inputs=batch(), search=search)
    optimizer = adam(pmodel)
    state, optimizer_state = get_state_dict(pmodel, optimizer)
    dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(pmodel, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    reference = mlp()[0]
    other = adam(reference)
    step(reference, other, 1)
    assert_same_parameters(pmodel, reference)
    for seed in (2, 3):
        step(pmodel, optimizer, seed)
        step(reference, other, seed)
    assert_same_parameters(pmodel, reference)


def loss_and_builds() -> tuple[float, int]:
    """The loss, and how often this rank listed and priced the decisions."""
    mesh = init_device_mesh("cpu", (2,))
    with mock.patch.object(DecisionList, "build", autospec=True, side_effect=DecisionList.build) as build:
        pmodel = autopar.compile(mlp()[0], mesh, example_inputs=batch(), search="megatron")
    return float(loss_of(pmodel, (batch(),)).detach()), build.call_count


def test_ranks_that_follow_the_first_price_nothing_again() -> None:
    (loss, first), (other, follower) = run_on_ranks(loss_and_builds, 2)
    assert (first, follower) == (1, 0)
    assert loss == other


def test_a_checkpoint_of_four_ranks_goes_on_on_two_by_two_and_on_one(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    run_on_ranks(save, 4, folder)
    run_on_ranks(load, 4, folder, (2, 2), "fsdp")
    run_on_ranks(load, 1, folder, (1,), "ilp")


def follow(path: str) -> tuple[str, bool, Any]:
    mesh = init_device_mesh("cpu", (2, 2))
    model, inputs = mlp()
    report = autopar.verify(model, mesh, example_inputs=inputs, plan=path)
    pmodel = autopar.compile(model, mesh, example_inputs=inputs, plan=path)
    return pmodel.plan.hash, report.ok, [pmodel.get_parameter(f"{index}.weight").placements for index in (0, 2, 4)]


def test_a_plan_that_a_person_edited_is_followed_and_right_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    model, inputs = mlp()
    made = autopar.make_plan(model, autopar.Mesh((2, 2), hardware="cpu"), example_inputs=inputs, search="ddp")
    made.save(path)
    data = json.loads(path.read_text())
    assert data["parameters"][WEIGHTS] == "R,R"
    data["parameters"][WEIGHTS] = "S0,R"
    path.write_text(json.dumps(data))
    edited = autopar.Plan.load(path)
    assert edited.hash != made.hash and "edited" in edited.notes[0]
    for digest, ok, placements in run_on_ranks(follow, 4, str(path)):
        assert digest == edited.hash and ok
        assert placements == [(Shard(0), Replicate())] * 3


def accumulate_and_clip() -> None:
    """Two halves, the first without a reduction, are one big batch; the norm is clipped as torch clips it."""
    mesh = init_device_mesh("cpu", (2, 2))
    model = mlp()[0]
    reference = copy.deepcopy(model)
    pmodel = autopar.compile(model, mesh, search="megatron")
    whole = batch(16)
    with pmodel.no_sync():
        (pmodel(whole[:8]).square().mean() / 2).backward()
    (pmodel(whole[8:]).square().mean() / 2).backward()
    reference(whole).square().mean().backward()
    for name, parameter in pmodel.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(full(parameter.grad), reference.get_parameter(name).grad, rtol=1e-4, atol=1e-8)
    norm = torch.nn.utils.clip_grad_norm_(pmodel.parameters(), 0.01)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    torch.testing.assert_close(full(norm), expected)
    for name, parameter in pmodel.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(full(parameter.grad), reference.get_parameter(name).grad, rtol=1e-4, atol=1e-8)


def test_accumulation_without_sync_is_a_big_batch_and_clipping_is_that_of_torch() -> None:
    run_on_ranks(accumulate_and_clip, 4)


def evaluate() -> None:
    model, inputs = vit()
    assert isinstance(inputs, dict)
    pmodel = autopar.compile(model, init_device_mesh("cpu", (2,)), search="fsdp")
    pixels = inputs["pixel_values"]
    pmodel.eval()
    model.eval()
    with torch.no_grad():
        actual, expected = pmodel(pixel_values=pixels), model(pixel_values=pixels)
    assert not actual.logits.requires_grad
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-5, atol=1e-6)


def test_evaluation_without_gradients_gives_the_outputs_of_one_device() -> None:
    run_on_ranks(evaluate, 2)
