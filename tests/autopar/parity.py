"""A model trained on real ranks beside a single-device copy of it, and how far apart the two come out."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from autopar.verification import ROUNDING_UNITS, Values, compare
from tests.autopar.models import Made

STEPS = 5
RATE = 1e-3


def call(module: nn.Module, inputs: Any) -> Any:
    return module(**inputs) if isinstance(inputs, dict) else module(*inputs)


def loss_of(module: nn.Module, inputs: Any) -> Tensor:
    """The model's own loss, or one computed outside from its output."""
    result = call(module, inputs)
    if isinstance(result, Tensor):
        target = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view_as(result)
        return F.mse_loss(result, target)
    loss: Tensor = result.loss
    return loss


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=RATE)


def full(tensor: Tensor) -> Tensor:
    whole = tensor.detach()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole


@dataclass
class Gaps:
    """The worst distances over a run: relative, but of parameters in units of their tolerance."""

    losses: list[float] = field(default_factory=list)  # by step
    gradient: float = 0.0  # the worst of the first step
    gradient_name: str = ""
    buffers: list[float] = field(default_factory=list)  # by step
    parameter: float = 0.0
    parameter_name: str = ""


def train_beside(module: nn.Module, optimizer: torch.optim.Optimizer, made: Made, steps: int = STEPS) -> Gaps:
    """Train `module` with `optimizer` and a copy of the model with AdamW on the same batch; compare after each step."""
    model, inputs = made
    twin = copy.deepcopy(model)
    gaps, free = Gaps(), _FreeSteps(twin)
    other = adam(twin)
    for index in range(steps):
        losses = [loss_of(held, inputs) for held in (module, twin)]
        for held, loss in zip((optimizer, other), losses, strict=True):
            held.zero_grad()
            loss.backward()
        first, second = (float(loss.detach()) for loss in losses)
        gaps.losses.append(abs(first - second) / abs(second))
        if index == 0:
            errors = _errors(_gradients(module), _gradients(twin))
            gaps.gradient_name, gaps.gradient = max(errors.items(), key=lambda item: item[1])
        gaps.buffers.append(max(_errors(_buffers(module), _buffers(twin)).values(), default=0.0))
        free.note()
        optimizer.step()
        other.step()
    expected = dict(twin.named_parameters())
    for name, parameter in module.named_parameters():
        error = float(((full(parameter) - expected[name].detach()).abs() / free.tolerance(name)).max())
        if error > gaps.parameter:
            gaps.parameter, gaps.parameter_name = error, name
    return gaps


def _gradients(module: nn.Module) -> Values:
    return Values({}, {name: full(item.grad) for name, item in module.named_parameters() if item.grad is not None}, {})


def _buffers(module: nn.Module) -> Values:
    return Values({}, {}, {name: full(item) for name, item in module.named_buffers()})


def _errors(actual: Values, expected: Values) -> dict[str, float]:
    """Relative, by name."""
    return {item.name: item.relative_error for item in compare(actual, expected, reference="").comparisons}


class _FreeSteps:
    """How far AdamW may carry an element whose gradient rounding decides.

    Adam divides by the gradient's own magnitude: an element whose gradient is no more than the rounding error of the
    sum that it is moves by up to RATE in a direction that the order of additions chooses. So a parameter's tolerance is
    1e-4 of its tensor's largest, and for each step in which the element's gradient was below the noise, two updates.
    """

    def __init__(self, twin: nn.Module) -> None:
        self.twin = twin
        self.moves = {name: torch.zeros_like(item) for name, item in twin.named_parameters()}

    def note(self) -> None:
        gradients = {name: item.grad for name, item in self.twin.named_parameters() if item.grad is not None}
        largest = max(float(item.abs().max()) for item in gradients.values())
        for name, gradient in gradients.items():
            noise = ROUNDING_UNITS * torch.finfo(gradient.dtype).eps * largest
            self.moves[name] += (gradient.abs() < noise) & (gradient != 0)

    def tolerance(self, name: str) -> Tensor:
        parameter = self.twin.get_parameter(name).detach()
        return 1e-4 * parameter.abs().max() + 2 * RATE * self.moves[name]
