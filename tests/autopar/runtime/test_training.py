"""The user's loop on real ranks gives the single device's losses, gradients, parameters and buffers."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.runtime.parallel_module import ParallelModule
from autopar.sharding.layout import Layout
from tests.autopar.runtime.compilers import FollowingCompiler
from tests.autopar.runtime.models import assert_same_state, batch, everything, mlp, tokens, train_both
from tests.gloo import run_on_ranks

S0, S1, R = Shard(0), Shard(1), Replicate()
ADAM = partial(torch.optim.AdamW, lr=1e-2)
STORED: dict[str, Layout] = {"0.weight": (S0,), "0.bias": (S0,), "2.weight": (S1,), "2.bias": (R,)}


def squares(module: nn.Module) -> Tensor:
    result: Tensor = (module(batch()) ** 2).mean()
    return result


def inner_loss(module: nn.Module) -> Tensor:
    loss: Tensor = module(**tokens())["loss"]
    return loss


def train_mlp(mesh_shape: tuple[int, ...], rows: Layout | None, stored: dict[str, Layout], optimizer: Any) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    model = mlp()
    module = ParallelModule(model, mesh, FollowingCompiler(mesh, rows, stored))
    train_both(module, model, squares, optimizer)
    for name, parameter in module.named_parameters():
        assert parameter.placements == stored.get(name, (R,) * len(mesh_shape))


@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.Adam, ADAM])
def test_a_lazy_module_made_before_its_optimizer_trains_as_one_device(optimizer: Any) -> None:
    run_on_ranks(train_mlp, 2, (2,), (S0,), STORED, optimizer)


@pytest.mark.parametrize("mesh_shape, rows", [((4,), (S0,)), ((2, 2), (S0, S0)), ((2, 2), (S0, R)), ((4,), None)])
def test_any_layout_of_the_batch_trains_as_one_device(mesh_shape: tuple[int, ...], rows: Layout | None) -> None:
    run_on_ranks(train_mlp, 4, mesh_shape, rows, {}, ADAM)


def test_parameters_stored_unevenly_train_as_one_device() -> None:
    stored: dict[str, Layout] = {"0.weight": (S0,), "0.bias": (S0,), "2.weight": (S0,), "2.bias": (S0,)}
    run_on_ranks(train_mlp, 4, (4,), (S0,), stored, ADAM)  # 10 and 6 rows over 4 ranks


def test_one_rank_needs_no_collectives() -> None:
    run_on_ranks(train_mlp, 1, (1,), (S0,), STORED, ADAM)


def train_everything(mesh_shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    model = everything()
    rows = (S0,) * len(mesh_shape)
    stored: dict[str, Layout] = {"embedding.weight": rows, "body.weight": rows, "unused.weight": rows}
    module = ParallelModule(model, mesh, FollowingCompiler(mesh, rows, stored), example_inputs=((), tokens()))
    assert module.head.weight is module.embedding.weight
    train_both(module, model, inner_loss, ADAM)
    assert int(module.calls) == 3 and int(model.calls) == 0
    assert module.unused.weight.grad is None and not module.frozen.weight.requires_grad


def test_tied_frozen_and_unused_parameters_and_buffers_are_those_of_one_device() -> None:
    run_on_ranks(train_everything, 2, (2,))


def look_beside_the_loss() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = everything()
    module = ParallelModule(model, mesh, FollowingCompiler(mesh, (S0,)))
    outputs = module(**tokens())
    assert type(outputs["loss"]) is Tensor
    assert isinstance(outputs["logits"], DTensor) and outputs["logits"].placements == (S0,)
    expected = model(**tokens())
    torch.testing.assert_close(outputs["logits"].full_tensor(), expected["logits"])
    with torch.no_grad():
        evaluated = module(ids=tokens()["ids"])
    assert type(evaluated["logits"]) is Tensor and not evaluated["logits"].requires_grad
    torch.testing.assert_close(evaluated["logits"], expected["logits"])


def test_outputs_beside_a_loss_stay_sharded_and_those_of_an_evaluation_are_whole() -> None:
    run_on_ranks(look_beside_the_loss, 2)


def accumulate(piling_up: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = mlp()
    module = ParallelModule(model, mesh, FollowingCompiler(mesh, (S0,), STORED))
    for seed in (1, 2):
        with module.no_sync() if piling_up == "unsummed" else nullcontext():
            ((module(batch(seed=seed)) ** 2).mean() / 3).backward()
        partial_sums = [parameter.grad.placements[0].is_partial() for parameter in module.parameters()]
        assert any(partial_sums) == (piling_up == "unsummed")
    ((module(batch(seed=3)) ** 2).mean() / 3).backward()
    for seed in (1, 2, 3):
        ((model(batch(seed=seed)) ** 2).mean() / 3).backward()
    assert_same_state(module, model)
    assert all(parameter.grad.placements == parameter.placements for parameter in module.parameters())


@pytest.mark.parametrize("piling_up", ["summed", "unsummed"])
def test_accumulated_gradients_are_sums_with_and_without_no_sync(piling_up: str) -> None:
    run_on_ranks(accumulate, 2, piling_up)


def differentiate_input() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = mlp()
    module = ParallelModule(model, mesh, FollowingCompiler(mesh, (S0,)))
    x, y = batch().requires_grad_(), batch().requires_grad_()
    (module(x) ** 2).mean().backward()
    (model(y) ** 2).mean().backward()
    torch.testing.assert_close(x.grad, y.grad)
    z = DTensor.from_local(batch().chunk(2)[mesh.get_local_rank()], mesh, (S0,)).requires_grad_()
    (module(z) ** 2).mean().backward()
    assert z.grad.placements == (S0,)
    torch.testing.assert_close(z.grad.full_tensor(), y.grad)


def test_inputs_that_require_gradients_get_them_whole_or_sharded_as_they_came() -> None:
    run_on_ranks(differentiate_input, 2)


def use_hooks_and_scaler() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = mlp()
    module = ParallelModule(model, mesh, FollowingCompiler(mesh, (S0,), STORED))
    seen: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = ADAM(module.parameters())
    scaler.scale(squares(module)).backward()
    assert sorted(seen) == sorted(dict(module.named_parameters()))
    scaler.unscale_(optimizer)
    squares(model).backward()
    assert_same_state(module, model)
    scaler.step(optimizer)
    scaler.update()
    ADAM(model.parameters()).step()
    assert_same_state(module, model)


def test_hooks_made_before_planning_run_and_a_gradient_scaler_works() -> None:
    run_on_ranks(use_hooks_and_scaler, 2)
