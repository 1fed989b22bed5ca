"""What a call may bring, when it plans again, and the errors of calls that cannot be run."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from autopar.errors import (
    AutoparError,
    CaptureError,
    InputError,
    MeshError,
    NoParametersError,
    NotDifferentiableError,
    NotDivisibleError,
    NotPlannedError,
    RankFailedError,
    RanksDisagreeError,
    UnsupportedModuleCallError,
)
from autopar.runtime.checks import RankGroup
from autopar.runtime.parallel_module import ParallelModule
from autopar.sharding.layout import Layout
from tests.autopar.runtime.compilers import FollowingCompiler
from tests.autopar.runtime.models import assert_same_state, batch, everything, mlp, tokens
from tests.gloo import run_on_ranks

S0 = Shard(0)
STORED: dict[str, Layout] = {"0.weight": (S0,), "2.weight": (Shard(1),)}


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def error_of(kind: type[Exception], action: Callable[[], Any]) -> str:
    """The message of the error that `action` raises."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def call_in_other_shapes_and_modes() -> None:
    model = mlp()
    compiler = FollowingCompiler(line(), (S0,), STORED)
    module = ParallelModule(model, line(), compiler, example_inputs=((batch(),), {}))
    placements = [parameter.placements for parameter in module.parameters()]
    identities = [id(parameter) for parameter in module.parameters()]
    for rows in (8, 4, 8, 4):
        torch.testing.assert_close(module(batch(rows)), model(batch(rows)))
    assert compiler.compiled == 2
    with torch.no_grad():
        torch.testing.assert_close(module(batch()), model(batch()))
    assert compiler.compiled == 3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result, expected = module(batch()), model(batch())
        result.float().sum().backward()
        expected.float().sum().backward()
    assert result.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(result, expected)
    assert compiler.compiled == 4
    assert placements == [parameter.placements for parameter in module.parameters()]
    assert identities == [id(parameter) for parameter in module.parameters()]


def test_other_shapes_and_modes_are_planned_once_each_under_the_same_layouts() -> None:
    run_on_ranks(call_in_other_shapes_and_modes, 2)


def freeze_and_evaluate_parts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    module = ParallelModule(model, line(), FollowingCompiler(line(), (S0,)))
    reference = copy.deepcopy(model)
    for held in (module, reference):
        held(batch()).sum().backward()
        held.zero_grad()
        held.get_submodule("1").eval()
        held.get_parameter("0.weight").requires_grad_(False)
        held(batch()).sum().backward()
    assert_same_state(module, reference)
    assert model[1].training and model[0].weight.requires_grad and int(model[1].num_batches_tracked) == 0
    module.eval()
    reference.eval()
    torch.testing.assert_close(module(batch()), reference(batch()))


def test_parts_can_be_frozen_and_set_to_evaluation_without_touching_the_model() -> None:
    run_on_ranks(freeze_and_evaluate_parts, 2)


def plan_for_evaluation_first() -> None:
    compiler = FollowingCompiler(line(), (S0,), {})
    module = ParallelModule(mlp(), line(), compiler)
    with torch.no_grad():
        expected = module(batch())
    assert all(parameter.placements[0].is_replicate() for parameter in module.parameters())
    compiler.parameters = STORED
    torch.testing.assert_close(module(batch()), expected)
    assert module.get_parameter("0.weight").placements == (S0,)
    assert module.backward_graph is not None
    with torch.no_grad():
        torch.testing.assert_close(module(batch()), expected)
    assert module.get_parameter("0.weight").placements == (S0,) and compiler.compiled == 3


def test_layouts_planned_for_evaluation_are_planned_anew_by_the_first_training_call() -> None:
    run_on_ranks(plan_for_evaluation_first, 2)


def disagree() -> list[str]:
    rank, mesh = dist.get_rank(), line()
    module = ParallelModule(mlp(), mesh, FollowingCompiler(mesh, (S0,)))
    module(batch())
    messages = [
        error_of(RanksDisagreeError, lambda: module(batch(8 if rank == 0 else 12))),  # only one rank plans anew
        error_of(RanksDisagreeError, lambda: module.train(rank == 0)(batch())),
        error_of(RanksDisagreeError, lambda: module(object() if rank == 0 else batch())),
    ]
    module.train()(batch())  # still works
    other = ParallelModule(mlp(), mesh, FollowingCompiler(mesh, (S0,), salt=str(rank)))
    messages.append(error_of(RanksDisagreeError, lambda: other(batch())))
    wrong = nn.Linear(8, 8 + rank)
    messages.append(error_of(RanksDisagreeError, lambda: ParallelModule(wrong, mesh, FollowingCompiler(mesh))))
    return messages


def test_ranks_that_disagree_raise_on_every_rank_and_can_go_on() -> None:
    for messages in run_on_ranks(disagree, 2):
        assert "[8, 8]" in messages[0] and "[12, 8]" in messages[0] and "ranks 1:" in messages[0]
        assert "training none" in messages[1]
        assert "object" in messages[2]
        assert "the plan" in messages[3]
        assert "[9, 8]" in messages[4]


def fail_alone() -> list[str]:
    ranks, rank = RankGroup(line()), dist.get_rank()

    def fail(on: int) -> str:
        if rank == on:
            raise CaptureError("it broke", where="model.py:3", fix="mend it")
        return "fine"

    return [
        error_of(CaptureError, lambda: ranks.first_decides(lambda: fail(0))),
        ranks.first_decides(lambda: fail(1)),
        error_of(CaptureError if rank == 1 else RankFailedError, lambda: ranks.all_succeed(lambda: fail(1))),
        ranks.all_succeed(lambda: str(rank)),
    ]


def test_what_fails_on_one_rank_raises_on_all() -> None:
    for rank, messages in enumerate(run_on_ranks(fail_alone, 2)):
        assert "it broke" in messages[0] and "model.py:3" in messages[0] and "mend it" in messages[0]
        assert messages[1] == "fine"
        assert "it broke" in messages[2] and (rank == 1 or "rank 1 failed" in messages[2])
        assert messages[3] == str(rank)


def call_wrongly() -> None:
    mesh = line()
    model = everything()
    before = copy.deepcopy(model.state_dict())
    module = ParallelModule(model, mesh, FollowingCompiler(mesh, (S0,)))
    error_of(NotPlannedError, lambda: module.plan)
    error_of(NotPlannedError, lambda: module.forward_graph)
    message = error_of(NotDivisibleError, lambda: module(**tokens(6)))
    assert "dim 0 of input 'ids' has size 6" in message and "4 ranks" in message
    assert "input ['ids']" in error_of(InputError, lambda: module(ids={1}))
    outputs = module(**tokens())
    assert "'logits'" in error_of(NotDifferentiableError, lambda: outputs["logits"].sum().backward())
    error_of(NoParametersError, lambda: ParallelModule(nn.ReLU(), mesh, FollowingCompiler(mesh)))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_calls_that_cannot_be_run_raise_errors_that_name_the_input() -> None:
    run_on_ranks(call_wrongly, 4)


def use_the_graph_twice() -> None:
    module = ParallelModule(mlp(), line(), FollowingCompiler(line(), (S0,)))
    loss = module(batch()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert "second time" in error_of(RuntimeError, loss.backward)
    loss = module(batch()).sum()
    with torch.no_grad():
        module.get_parameter("2.weight").mul_(2.0)
    assert "inplace operation" in error_of(RuntimeError, loss.backward)


def test_a_graph_is_used_once_and_with_the_parameters_it_was_made_with() -> None:
    run_on_ranks(use_the_graph_twice, 1)


def ask_for_the_impossible() -> None:
    module = ParallelModule(mlp(), line(), FollowingCompiler(line()))
    error_of(UnsupportedModuleCallError, module.half)
    error_of(UnsupportedModuleCallError, lambda: module.to_empty(device="cpu"))
    error_of(UnsupportedModuleCallError, lambda: copy.deepcopy(module))
    error_of(UnsupportedModuleCallError, lambda: pickle.dumps(module))
    assert module.to("cpu") is module and module.cpu() is module


def test_what_a_distributed_module_cannot_do_is_refused() -> None:
    run_on_ranks(ask_for_the_impossible, 1)


def leave_a_rank_out() -> str:
    mesh = DeviceMesh("cpu", [0])
    if dist.get_rank() == 0:
        ParallelModule(mlp(), mesh, FollowingCompiler(mesh))(batch())
        return ""
    return error_of(MeshError, lambda: ParallelModule(mlp(), mesh, FollowingCompiler(mesh)))


def test_a_rank_outside_the_mesh_is_told_so() -> None:
    assert "rank 1 is not in the mesh" in run_on_ranks(leave_a_rank_out, 2)[1]


def draw_masks() -> None:
    mesh = line()
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5))
    module = ParallelModule(model, mesh, FollowingCompiler(mesh, (S0,)))
    drawn = []
    for seed in (3, 4, 3):
        torch.manual_seed(seed + dist.get_rank())  # the first rank's counts
        drawn.append([module(batch()) for _ in range(2)])
    assert torch.equal(drawn[0][0], drawn[2][0]) and torch.equal(drawn[0][1], drawn[2][1])
    assert not torch.equal(drawn[0][0], drawn[0][1]) and not torch.equal(drawn[0][0], drawn[1][0])
    everywhere = [torch.empty_like(drawn[0][0]) for _ in range(2)]
    dist.all_gather(everywhere, drawn[0][0].detach())
    assert torch.equal(*everywhere)


def test_the_first_ranks_seed_reproduces_a_run() -> None:
    run_on_ranks(draw_masks, 2)


def test_a_mesh_without_a_process_group_is_refused() -> None:
    no_group: Any = None
    with pytest.raises(AutoparError, match="no process group"):
        RankGroup(no_group)
