"""The head of every optimizer's step: the loss computed anew where a closure is given, and what is to be stepped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer


class ClosureStep(Optimizer, ABC):
    """An optimizer whose step is `_step`, without gradients, after the closure."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step for every parameter that has a gradient; `closure` computes the loss anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @abstractmethod
    def _step(self) -> None:
        """Step the parameters that have gradients."""

    def _with_gradients(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Every parameter that has a gradient, with the options of its group."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield parameter, group
