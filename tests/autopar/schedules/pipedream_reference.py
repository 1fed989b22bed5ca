"""PipeDream without a pipeline: one microbatch after the other, each with the weight versions that the papers give it.

Nothing here knows of schedules or actions. Microbatch i of stage s among p runs its forward with a version of that
stage's weights (a version counts updates), and its gradients are applied to the newest:

- stashing: forward and backward with version max(0, i - (p - 1 - s));
- vertical sync: with version max(0, i - (p - 1)) at every stage;
- 2BW: with version max(0, i // n - 1), the mean gradient of n microbatches applied at once;
- no stashing: the forward as with stashing, the backward with the newest, as if weights were overwritten in between.

Sources: Harlap et al., arXiv:1806.03377, section 3.3; Narayanan et al., arXiv:2006.09503, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor, nn

Weights = list[Tensor]
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Staleness(Enum):
    """Which version of the weights a microbatch meets."""

    STASHING = "stashing"
    VERTICAL_SYNC = "vertical sync"
    DOUBLE_BUFFERED = "2bw"
    NO_STASHING = "no stashing"

    def versions(self, item: int, stage: int, stages: int, update_every: int) -> tuple[int, int]:
        """(of the forward, of the backward)."""
        newest = item // update_every
        if self is Staleness.DOUBLE_BUFFERED:
            forward = max(0, newest - 1)
        elif self is Staleness.VERTICAL_SYNC:
            forward = max(0, item - (stages - 1))
        else:
            forward = max(0, item - (stages - 1 - stage))
        return forward, newest if self is Staleness.NO_STASHING else forward


class PipeDreamReference:
    """Trains `stages` in place; `losses` has one loss for each microbatch."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: Optimizer,
        staleness: Staleness,
        *,
        update_every: int = 1,
    ) -> None:
        self.stages, self.loss, self.staleness, self.update_every = list(stages), loss, staleness, update_every
        self.optimizers = [optimizer(list(stage.parameters())) for stage in self.stages]
        self.versions: list[list[Weights]] = [[_copy(stage)] for stage in self.stages]
        self.losses: list[float] = []
        self.gradients: list[list[Weights]] = []  # by microbatch and stage

    def run(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """One update after every `update_every` microbatches, on every stage."""
        gathered: list[Weights] = []
        for item, (value, target) in enumerate(batches):
            gradients = self._microbatch(item, value, target)
            self.gradients.append(gradients)
            gathered = gradients if not gathered else [
                [one + two for one, two in zip(before, now, strict=True)]
                for before, now in zip(gathered, gradients, strict=True)
            ]  # fmt: skip
            if (item + 1) % self.update_every == 0:
                self._update(gathered)
                gathered = []

    def _microbatch(self, item: int, value: Tensor, target: Tensor) -> list[Weights]:
        wanted = [self.staleness.versions(item, stage, len(self.stages), self.update_every)
                  for stage in range(len(self.stages))]  # fmt: skip
        inputs, outputs = [], []
        for stage, module in enumerate(self.stages):
            _load(module, self.versions[stage][wanted[stage][0]])
            inputs.append(value.detach().requires_grad_(value.is_floating_point()))
            outputs.append(module(inputs[-1]))
            value = outputs[-1]
        last = outputs[-1].detach().requires_grad_()
        loss = self.loss(last, target)
        self.losses.append(float(loss.detach()))
        (arriving,) = torch.autograd.grad(loss, last)
        gradients: list[Weights] = []
        for stage in reversed(range(len(self.stages))):
            module = self.stages[stage]
            _load(module, self.versions[stage][wanted[stage][1]])  # what autograd saved of the weights is these now
            arriving, *own = torch.autograd.grad(outputs[stage], [inputs[stage], *module.parameters()], arriving)
            gradients.insert(0, list(own))
        return gradients

    def _update(self, gathered: list[Weights]) -> None:
        for stage, module in enumerate(self.stages):
            _load(module, self.versions[stage][-1])
            for parameter, gradient in zip(module.parameters(), gathered[stage], strict=True):
                parameter.grad = gradient / self.update_every
            self.optimizers[stage].step()
            self.versions[stage].append(_copy(module))


def _copy(module: nn.Module) -> Weights:
    return [parameter.detach().clone() for parameter in module.parameters()]


def _load(module: nn.Module, weights: Weights) -> None:
    """Overwrite the weights where they are, unseen by autograd, as an optimizer of another process would."""
    for parameter, value in zip(module.parameters(), weights, strict=True):
        parameter.data.copy_(value)
