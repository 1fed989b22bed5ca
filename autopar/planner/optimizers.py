"""How much state an optimizer holds, found by stepping it once on a small parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.errors import UnsupportedOptionError
from autopar.planner.decisions import NO_OPTIMIZER, Optimizer

OptimizerFactory = Callable[..., torch.optim.Optimizer]
PROBE = 64  # rows and columns of the parameter that is stepped


def optimizer_of(factory: OptimizerFactory | None) -> Optimizer:
    """The state of an optimizer class or factory (called with a list of parameters), per byte of parameter.

    Scalars such as step counts are left out. None: no optimizer is counted.
    """
    if factory is None:
        return NO_OPTIMIZER
    parameter = torch.nn.Parameter(torch.zeros(PROBE, PROBE))
    try:
        optimizer = factory([parameter])
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    except (TypeError, AttributeError) as error:
        raise UnsupportedOptionError(
            f"optimizer={factory!r} makes no optimizer of a list of parameters: {error}",
            fix="pass a class or a factory, e.g. lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
        ) from error
    state = sum(_state_bytes(value) for value in optimizer.state[parameter].values())
    return Optimizer(type(optimizer).__name__, state / parameter.nbytes)


def _state_bytes(value: Any) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) and value.dim() else 0
