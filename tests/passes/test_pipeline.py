"""Programs emitted under random plans compute what the model computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.program import OutputKind
from tests.passes.assignments import random_assignment
from tests.passes.programs import captured
from tests.passes.running import Step, emit_all

MODELS = ("mlp", "transformer", "convnet")


def expected(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Output, and gradients and buffers by name, of the model on a single device; the tangent of an output is ones."""
    model = copy.deepcopy(model)
    output = model(*inputs)
    output.sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return output.detach(), {**found, **dict(model.named_buffers())}


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_valid_plan_computes_what_the_model_computes(name: str, mesh_shape: tuple[int, ...]) -> None:
    model, inputs, program = captured(name)
    output, named = expected(model, inputs)
    assignment = random_assignment(program, mesh_shape, seed=len(name))
    step = Step(model, inputs, emit_all(program, assignment), assignment)
    for (kind, key), value in step.run().items():
        wanted = named[key] if kind in (OutputKind.GRADIENT, OutputKind.BUFFER) else output
        torch.testing.assert_close(value, wanted, msg=lambda text, key=key: f"{key}: {text}")
