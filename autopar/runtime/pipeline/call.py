"""One call of a pipeline: the schedule around one autograd node, and what the user gets of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.capture.program import LeafIndex, OmittedOutput, OutputKind, ProgramOutput
from autopar.errors import UnsupportedOptionError
from autopar.runtime.pipeline.gathered import OutputKey
from autopar.runtime.pipeline.run import BoundPipeline
from autopar.runtime.pipeline.step import user_outputs
from autopar.runtime.pipeline.worker import Worker
from autopar.schedules.actions import halves
from autopar.sharding.dtensors import as_dtensor, layout_of

_ELSEWHERE = "call the module inside `with pmodel.outputs_everywhere():`, which gives it to every rank"


@dataclass
class Call:
    """One call between its forward and its backward."""

    bound: BoundPipeline
    worker: Worker
    parameters: Mapping[str, DTensor]  # of this rank
    buffers: Mapping[str, Tensor]
    gradients: Mapping[str, DTensor] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The parameters of this rank that get gradients."""
        program = self.bound.step.staged.program
        trained = {output.name for output in program.outputs if output.kind is OutputKind.GRADIENT}
        return [name for name, item in self.parameters.items() if name in trained and item.requires_grad]

    @property
    def given(self) -> tuple[OutputKey, ...]:
        """The outputs that every rank gets."""
        return self.worker.given

    @property
    def differentiated(self) -> list[Tensor]:
        return [self.parameters[name] for name in self.names]

    def run_all(self) -> tuple[Tensor, ...]:
        """Run the schedule; the gradients are then those of the loss."""
        self.bound.follow(self.worker, self.bound.actions)
        self.gradients = self.bound.parameter_gradients(self.worker)
        return self._results()

    def train(self) -> Tensor:
        """Run an asynchronous schedule; the mean loss."""
        self.bound.follow(self.worker, self.bound.actions)
        self._write_buffers()
        losses = [key for key in user_outputs(self.bound.step.staged.program) if key[0] is OutputKind.LOSS]
        return self.bound.everywhere(self.worker, losses[0]) / self.bound.step.schedule.microbatches

    def run_forward(self) -> tuple[Tensor, ...]:
        """Run the forward half of the schedule."""
        self.bound.follow(self.worker, halves(self.bound.actions)[0])
        if self.bound.hosted:
            self.bound.lane.settle_host()
        return self._results()

    def _results(self) -> tuple[Tensor, ...]:
        self._write_buffers()
        return tuple(self.bound.everywhere(self.worker, key) for key in self.given)

    def run_backward(self, tangents: Mapping[str, Tensor]) -> None:
        """Run the backward half."""
        self.worker.batch = replace(self.worker.batch, tangents=tangents)
        self.bound.follow(self.worker, halves(self.bound.actions)[1])
        self.gradients = self.bound.parameter_gradients(self.worker)

    def delivered(self, arrived: Mapping[ProgramOutput, Tensor | None]) -> list[Tensor | None]:
        """The gradients of this rank's parameters, from what arrived at the outputs."""
        if self.bound.replaced:
            raise UnsupportedOptionError(
                "experts were moved between a call and its backward", fix="call backward() first, then rebalance()"
            )
        given = {output: tangent for output, tangent in arrived.items() if tangent is not None}
        if not given:
            return [None for _ in self.names]
        if not self.bound.has_loss:
            self.run_backward(self._tangents(given))
            return [self.gradients.get(name) for name in self.names]
        (scale,) = given.values()
        plain = bool(scale == 1)
        return [
            None if (gradient := self.gradients.get(name)) is None else gradient if plain else _scaled(gradient, scale)
            for name in self.names
        ]

    def _tangents(self, given: Mapping[ProgramOutput, Tensor]) -> dict[str, Tensor]:
        """What arrived at each output that is differentiated; zeros where nothing did."""
        program = self.bound.step.staged.program
        tangents = {}
        for output, node in zip(program.outputs, program.results, strict=True):
            if output.differentiable:
                zeros = torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype)
                tangents[output.name] = given.get(output, zeros.to(self.bound.place.mesh.device_type)).contiguous()
        return tangents

    def _write_buffers(self) -> None:
        for output in self.bound.step.staged.program.outputs:
            if output.kind is OutputKind.BUFFER:
                value = self.bound.everywhere(self.worker, (output.kind, output.name))
                self.buffers[output.name].copy_(value)


def _scaled(gradient: DTensor, scale: Tensor) -> DTensor:
    """A gradient times a number, where the gradient lies."""
    local = gradient.to_local()
    return as_dtensor(local * scale.to(local.device), gradient.device_mesh, layout_of(gradient), gradient.shape)


class PipelineFunction(torch.autograd.Function):
    """The whole schedule as one autograd node."""

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = call.run_all() if call.bound.has_loss else call.run_forward()
        ctx.set_materialize_grads(False)
        ctx.call = call
        by_key = {(output.kind, output.name): output for output in call.bound.step.staged.program.outputs}
        ctx.outputs = [by_key[key] for key in call.given]
        ctx.mark_non_differentiable(
            *(value for output, value in zip(ctx.outputs, outputs, strict=True) if not output.differentiable)
        )
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *arrived: Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        return None, None, *call.delivered(dict(zip(ctx.outputs, arrived, strict=True)))


def result_of(call: Call, outputs: tuple[Tensor, ...]) -> Any:
    """The user's output, with marks for what is on other ranks."""
    program = call.bound.step.staged.program
    keys, by_key = user_outputs(program), dict(zip(call.given, outputs, strict=True))
    leaves: list[Any] = []
    for leaf in program.output_leaves:
        if not isinstance(leaf, LeafIndex):
            leaves.append(leaf)
            continue
        key = keys[leaf.index]
        leaves.append(
            by_key.get(key, OmittedOutput(key[1], "tensor of the last stage, which let go of it", _ELSEWHERE))
        )
    return pytree.tree_unflatten(leaves, program.output_spec)
