"""One call of a distributed model: a single autograd node around the local forward and backward graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.capture.program import InputKind, LeafIndex, OutputKind
from autopar.capture.trace import input_gradient
from autopar.errors import NotDifferentiableError
from autopar.runtime.bound_step import BoundStep, RunGraph, Slot, plainly
from autopar.runtime.experts.load import ExpertCounter
from autopar.runtime.inputs import rank_part
from autopar.runtime.parameters import full_value, in_layout, lay_out_anew
from autopar.sharding.dtensors import as_dtensor, layout_of, redistributed
from autopar.torch_compat import after_backward, apply_function


class Reduction(Enum):
    """When the gradients of a call are summed over the ranks."""

    NOW = "now"
    LATER = "later"  # in no_sync: gradients pile up as partial sums
    AT_END = "at end"  # pile up once more, then sum when the backward pass is done


@dataclass(frozen=True)
class State:
    """The tensors of the model by name: parameters as DTensors, buffers in full."""

    parameters: Mapping[str, DTensor]
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class Call:
    """What one call brings along besides the tensors that gradients flow to."""

    step: BoundStep
    state: State
    inputs: Mapping[str, Tensor]  # the user's tensors by path
    seed: int
    reduction: Reduction
    counter: ExpertCounter
    run: RunGraph = plainly

    @property
    def differentiated(self) -> list[Tensor]:
        """The tensors to which the step returns gradients, in its order."""
        given = {input_gradient(name): tensor for name, tensor in self.inputs.items()}
        known: dict[str, Tensor] = {**given, **self.state.parameters}
        return [known[slot.name] for slot in self.step.gradients]

    def local_values(self) -> dict[str, Tensor]:
        """This rank's value of every placeholder of the forward graph."""
        mesh, slots = self.step.mesh, self.step.inputs
        values = {slot.node: self.state.parameters[slot.name].to_local() for slot in slots[InputKind.PARAMETER]}
        for slot in slots[InputKind.BUFFER]:
            values[slot.node] = in_layout(self.state.buffers[slot.name], mesh, slot.layout)
        for slot in slots[InputKind.INPUT]:
            values[slot.node] = rank_part(self.inputs[slot.name], mesh, slot.layout)
        for slot in slots[InputKind.CONSTANT]:
            values[slot.node] = in_layout(self.step.step.program.constants[slot.name], mesh, slot.layout)
        for slot in slots[InputKind.SEED]:
            values[slot.node] = torch.tensor(self.seed, dtype=torch.int64, device=mesh.device_type)
        return values


def run_call(call: Call) -> Any:
    """The user's output of one call; a backward pass through it returns this rank's part of every gradient."""
    if call.step.gradients and torch.is_grad_enabled():
        outputs = apply_function(_Step, call, *call.differentiated)
    else:
        with torch.no_grad():
            outputs = _forward(call)[0]
        call.step.settle_host()
    program = call.step.step.program
    leaves = [outputs[leaf.index] if isinstance(leaf, LeafIndex) else leaf for leaf in program.output_leaves]
    return pytree.tree_unflatten(leaves, program.output_spec)


def _forward(call: Call) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """(the user's outputs, tensors saved for the backward); mutated buffers have their new values."""
    results = call.step.run_forward(call.local_values(), call.run)
    call.counter.add(call.step.expert_counts, results.counts)
    saved = _write_buffers(call, results.buffers, results.saved)
    outputs = []
    for (kind, slot), local in zip(call.step.outputs, results.outputs, strict=True):
        outputs.append(_user_output(call, kind, slot, local.detach()))
    return tuple(outputs), saved


def _user_output(call: Call, kind: OutputKind, slot: Slot, local: Tensor) -> Tensor:
    """A loss, and every output of a step without one, in full; what is beside a loss as the shard that it is."""
    if kind is OutputKind.OUTPUT and call.step.has_loss:
        return as_dtensor(local, call.step.mesh, slot.layout, slot.shape)
    return full_value(local, call.step.mesh, slot.layout, slot.shape)


def _write_buffers(call: Call, values: Sequence[Tensor], saved: list[Tensor]) -> list[Tensor]:
    """Copy the new values into the buffers; the backward keeps the old ones, if it needs them, in copies."""
    slots = call.step.buffers
    written = {_storage(call.state.buffers[slot.name]) for slot in slots}
    saved = [item.clone() if _storage(item) in written else item for item in saved]
    fresh = [value.clone() if _storage(value) in written else value for value in values]
    for slot, value in zip(slots, fresh, strict=True):
        call.state.buffers[slot.name].copy_(full_value(value, call.step.mesh, slot.layout, slot.shape))
    return saved


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Step(torch.autograd.Function):
    """The whole program as one autograd node."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, saved = _forward(call)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.saved_count = call, len(saved)
        ctx.save_for_backward(*saved, *_aliased(saved, tensors))
        ctx.mark_non_differentiable(*_constants(call.step, outputs))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *arrived: Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        saved = list(ctx.saved_tensors[: ctx.saved_count])
        ctx.maybe_clear_saved_tensors()
        tangents = _tangents(call.step, arrived)
        if all(tangent is None for tangent in arrived):
            return None, *(None for _ in call.step.gradients)
        gradients = call.step.run_backward(saved, tangents, call.run)
        call.step.settle_host()
        if call.reduction is Reduction.AT_END:
            after_backward(lambda: reduce_gradients(call.state.parameters))
        return None, *_delivered(call, gradients, [item for item in arrived if item is not None])


def _constants(step: BoundStep, outputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs that require no gradient: integers, and what a step without a loss does not differentiate.

    What is beside a loss is told apart only when a gradient arrives there, which is an error.
    """
    pairs = zip(step.outputs, outputs, strict=True)
    known = [item for (_, slot), item in pairs if not (step.has_loss or slot.differentiable)]
    return known or [item for item in outputs if not (item.is_floating_point() or item.is_complex())]


def _aliased(saved: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parameters whose shards are saved: saving them too lets autograd notice that one was written meanwhile.

    An in-place op on a DTensor counts a version of the DTensor, not of the shard inside.
    """
    storages = {_storage(item) for item in saved}
    return [item for item in tensors if isinstance(item, DTensor) and _storage(item.to_local()) in storages]


def _tangents(step: BoundStep, arrived: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """This rank's part of every tangent by placeholder; zeros where no gradient arrived."""
    given: dict[str, Tensor] = {}
    for (_, slot), tangent in zip(step.outputs, arrived, strict=True):
        if tangent is not None and not slot.differentiable:
            raise NotDifferentiableError(
                f"a gradient arrived at output {slot.name!r}, through which the program has no backward",
                fix="compute all that is differentiated inside the model and return it as the loss, or return no "
                "scalar loss from the model so that every output is differentiated; detach what is only looked at",
            )
        if tangent is not None:
            given[slot.name] = tangent
    tangents = {}
    for slot in step.inputs[InputKind.TANGENT]:
        full = given.get(slot.name)
        if full is None:
            full = torch.zeros(slot.shape, dtype=slot.dtype, device=step.mesh.device_type)
        tangents[slot.node] = in_layout(full, step.mesh, slot.layout)
    return tangents


def _delivered(call: Call, gradients: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor | None]:
    """Each gradient as what autograd hands on: a DTensor for a parameter, a full tensor for a plain input."""
    taken = {_storage(item.to_local() if isinstance(item, DTensor) else item) for item in tangents}
    delivered: list[Tensor | None] = []
    for slot, gradient, tensor in zip(call.step.gradients, gradients, call.differentiated, strict=True):
        local = gradient.contiguous()
        if _storage(local) in taken:  # two gradients, or a gradient and a tangent, that are one tensor
            local = local.clone()
        taken.add(_storage(local))
        if slot.name in call.state.parameters:
            held = as_dtensor(local, call.step.mesh, slot.layout, slot.shape)
            delivered.append(_parameter_gradient(call, held, tensor))
        else:
            delivered.append(_input_gradient(call.step, local, slot, tensor))
    return delivered


def _parameter_gradient(call: Call, gradient: DTensor, parameter: Tensor) -> DTensor:
    """The gradient as it leaves the backward, in the layout that the plan gave it unless reductions are put off.

    Autograd adds gradients of one layout only, so one that the parameter holds in another is brought to its own.
    """
    assert isinstance(parameter, DTensor)
    held = parameter.grad
    if isinstance(held, DTensor) and held.placements != gradient.placements:
        lay_out_anew(held, layout_of(parameter))
        gradient = redistributed(gradient, layout_of(parameter))
    return gradient


def _input_gradient(step: BoundStep, local: Tensor, slot: Slot, tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        gradient = as_dtensor(local, step.mesh, slot.layout, slot.shape)
        return gradient.redistribute(tensor.device_mesh, tensor.placements)
    return full_value(local, step.mesh, slot.layout, slot.shape).to(tensor.device)


def reduce_gradients(parameters: Mapping[str, DTensor]) -> None:
    """Sum over the ranks what `no_sync` left unsummed: such a gradient goes to its parameter's layout."""
    for parameter in parameters.values():
        if isinstance(parameter.grad, DTensor) and _is_pending(parameter.grad, parameter):
            lay_out_anew(parameter.grad, layout_of(parameter))


def has_pending_gradients(parameters: Mapping[str, DTensor]) -> bool:
    """Whether any gradient is still a partial sum of this rank's own."""
    gradients = ((parameter.grad, parameter) for parameter in parameters.values())
    return any(isinstance(held, DTensor) and _is_pending(held, own) for held, own in gradients)


def _is_pending(gradient: DTensor, parameter: DTensor) -> bool:
    """Whether a gradient is neither in its parameter's layout nor in shards of it."""
    pairs = zip(layout_of(gradient), layout_of(parameter), strict=True)
    return any(own != wanted and not own.is_shard() for own, wanted in pairs)
