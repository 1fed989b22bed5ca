"""Runs any schedule in one process on plain modules: each rank as far as it can, sends and recvs through a dictionary.

For tests: it follows the actions alone, so it shows that a schedule says all that an executor needs to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from autopar.schedules.actions import Action, Schedule


class Interpreter:
    """Stages as modules, one optimizer for each; the loss is the last stage's."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[nn.Module],
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        batches: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self.schedule, self.stages, self.loss, self.optimizers = schedule, stages, loss, optimizers
        self.batches = batches
        self.mail: dict[tuple[str, int, int], Tensor] = {}  # kind, reading stage, microbatch
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.arrived: dict[tuple[int, int], Tensor] = {}  # gradients of a stage's output
        self.returned: dict[tuple[int, int], Tensor] = {}  # gradients of a stage's input
        self.stashed: dict[tuple[int, int], list[Tensor]] = {}
        self.newest: dict[int, list[Tensor]] = {}  # while an older version is in place
        self.losses: dict[int, float] = {}

    def run(self) -> None:
        lists = [list(actions) for actions in self.schedule.ranks]
        while any(lists):
            moved = False
            for actions in lists:
                while actions and self._do(actions[0]):
                    actions.pop(0)
                    moved = True
            assert moved, [str(actions[0]) for actions in lists if actions]

    def _do(self, action: Action) -> bool:
        stage, item, kind = action.stage, action.microbatch, action.kind
        if kind == "send_activation":
            self.mail["forward", action.peer, item] = self.outputs[stage, item].detach()
        elif kind == "send_gradient":
            self.mail["gradient", action.peer, item] = self.returned.pop((stage, item))
        elif kind == "recv_activation":
            return self._receive("forward", stage, item, self.inputs)
        elif kind == "recv_gradient":
            return self._receive("gradient", stage, item, self.arrived)
        elif kind == "forward":
            self._forward(stage, item)
        elif kind == "backward":
            self._backward(stage, item)
        else:
            self._weights(action)
        if kind in ("forward", "backward") and stage in self.newest:
            _load(self.stages[stage], self.newest.pop(stage))
        return True

    def _receive(self, kind: str, stage: int, item: int, where: dict[tuple[int, int], Tensor]) -> bool:
        if (kind, stage, item) not in self.mail:
            return False
        where[stage, item] = self.mail.pop((kind, stage, item))
        return True

    def _forward(self, stage: int, item: int) -> None:
        value = self.batches[item][0] if stage == 0 else self.inputs[stage, item]
        self.inputs[stage, item] = value.detach().requires_grad_()
        self.outputs[stage, item] = self.stages[stage](self.inputs[stage, item])

    def _backward(self, stage: int, item: int) -> None:
        output = self.outputs.pop((stage, item))
        if stage == self.schedule.stages - 1:
            loss = self.loss(output, self.batches[item][1])
            self.losses[item] = float(loss.detach())
            output, arriving = loss, torch.ones(())
        else:
            arriving = self.arrived.pop((stage, item))
        module, value = self.stages[stage], self.inputs.pop((stage, item))
        self.returned[stage, item], *own = torch.autograd.grad(output, [value, *module.parameters()], arriving)
        for parameter, gradient in zip(module.parameters(), own, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _weights(self, action: Action) -> None:
        module, key = self.stages[action.stage], (action.stage, action.version)
        if action.kind == "optimizer_step":
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.grad /= self.schedule.update_every
            with _unsafe_preserve_version_counter(tuple(module.parameters())):
                self.optimizers[action.stage].step()  # what autograd saved of the weights is overwritten, unseen
            self.optimizers[action.stage].zero_grad()
        elif action.kind == "stash_weights":
            self.stashed[key] = _copy(module)
        elif action.kind == "drop_weights":
            del self.stashed[key]
        else:
            self.newest[action.stage] = _copy(module)
            _load(module, self.stashed[key])


def _copy(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def _load(module: nn.Module, weights: list[Tensor]) -> None:
    for parameter, value in zip(module.parameters(), weights, strict=True):
        parameter.data.copy_(value)
