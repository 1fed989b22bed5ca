"""All ranks of a step in one process give the single device's outputs, gradients and buffers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.tensor import Shard

from autopar.capture.trace import capture
from autopar.runtime.virtual_run import run_virtual_step
from autopar.sharding.layout import Layout
from tests.autopar.runtime.compilers import following_assignment
from tests.autopar.runtime.models import batch, everything, mlp, tokens

S0 = Shard(0)


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (4,), (2, 2), (2, 2, 2)])
def test_a_virtual_step_is_a_step_of_one_device(mesh_shape: tuple[int, ...]) -> None:
    model, rows = everything(), (S0,) * len(mesh_shape)
    program = capture(model, (), tokens())
    stored: dict[str, Layout] = {"embedding.weight": rows, "body.weight": rows}
    assignment = following_assignment(program, mesh_shape, rows, stored)
    run = run_virtual_step(model, program, assignment, mesh_shape, (), tokens(), seed=0)
    expected = copy.deepcopy(model)
    outputs = expected(**tokens())
    outputs["loss"].backward()
    torch.testing.assert_close(dict(run.outputs), {name: value.detach() for name, value in outputs.items()})
    gradients = {name: item.grad for name, item in expected.named_parameters() if item.grad is not None}
    torch.testing.assert_close(dict(run.gradients), gradients)
    assert dict(run.buffers) == {"calls": torch.tensor(1)} and int(model.calls) == 0
    assert len(run.peak_bytes) == torch.Size(mesh_shape).numel()


def test_outputs_without_a_loss_take_the_tangents_given() -> None:
    model, x = mlp(), batch()
    program = capture(model, (x,), {})
    assignment = following_assignment(program, (2,), (S0,), {})
    tangent = torch.randn(8, 6)
    run = run_virtual_step(model, program, assignment, (2,), (x,), {}, seed=0, tangents={"output": tangent})
    model(x).backward(tangent)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(run.gradients[name], parameter.grad)


def test_a_step_without_gradients_has_outputs_alone() -> None:
    model, x = mlp(), batch()
    with torch.no_grad():
        program = capture(model, (x,), {})
        run = run_virtual_step(model, program, following_assignment(program, (4,), (S0,), {}), (4,), (x,), {}, seed=0)
        torch.testing.assert_close(run.outputs["output"], model(x))
    assert not run.gradients and not run.buffers


def test_sharding_the_batch_lowers_each_ranks_peak() -> None:
    model, x = mlp(), batch(256)
    program = capture(model, (x,), {})
    peaks = []
    for ranks in (1, 2, 4):
        assignment = following_assignment(program, (ranks,), (S0,), {})
        peaks.append(run_virtual_step(model, program, assignment, (ranks,), (x,), {}, seed=0).peak_bytes[0])
    assert peaks[0] > peaks[1] > peaks[2]
