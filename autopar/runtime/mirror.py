"""Empty modules in the shape of the model: they hold its distributed tensors under the original names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import StateDictError, UnsupportedModuleCallError
from autopar.runtime.experts.order import ExpertOrder
from autopar.runtime.parameters import in_layout
from autopar.sharding.dtensors import as_dtensor, layout_of


class Container(nn.Module):
    """A module of tensors and children, without a computation of its own.

    `elsewhere`: its parameters that other ranks hold, those of other pipeline stages. `orders`: of those whose rows are
    experts in another order than the model's; a state_dict is in the model's, and then needs every rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: set[str] = set()
        self.orders: dict[str, ExpertOrder] = {}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, order in self.orders.items():
            destination[prefix + name] = order.in_model_order(destination[prefix + name])

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Full tensors, and DTensors of any mesh and placements, are brought to the layout of what they replace."""
        local_metadata = {**local_metadata, "assign_to_params_buffers": False}  # values are copied into the shards
        for name in self.elsewhere:
            state_dict.pop(prefix + name, None)
        own = {**self._parameters, **self._buffers}
        for name, tensor in own.items():
            if tensor is not None and prefix + name in state_dict:
                value = fitted(prefix + name, state_dict[prefix + name], tensor)
                if name in self.orders and isinstance(value, Tensor) and value.shape == tensor.shape:
                    value = self.orders[name].in_rows(value)
                state_dict[prefix + name] = value
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001 - as nn.Module has it
        """Allowed where it changes nothing, as `.to(device)` of the mesh's own device type."""
        for tensor in (*self.parameters(), *self.buffers()):
            probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            changed = fn(probe)
            if (changed.dtype, changed.device) != (probe.dtype, probe.device):
                raise UnsupportedModuleCallError(
                    f"a distributed module cannot be changed to {changed.dtype} on {changed.device}",
                    fix="change the model's dtype before autopar.compile; the mesh decides the device",
                )
        return self

    def to_empty(self, **_: Any) -> Self:
        raise UnsupportedModuleCallError(
            "a distributed module cannot be emptied", fix="give autopar.compile a model on the meta device"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise UnsupportedModuleCallError(
            "a distributed module cannot be copied", fix="copy the model and compile the copy; save with state_dict()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedModuleCallError(
            "a distributed module cannot be pickled",
            fix="save pmodel.state_dict() with torch.distributed.checkpoint, and pmodel.plan.save(path)",
        )


def fitted(name: str, value: Any, target: Tensor) -> Any:
    """`value` as a tensor that can be copied into `target`."""
    if not isinstance(value, Tensor) or value.shape != target.shape:
        return value  # nn.Module has its own message for these
    if isinstance(target, DTensor):
        local = in_layout(value, target.device_mesh, layout_of(target))
        return as_dtensor(local, target.device_mesh, layout_of(target), target.shape)
    if isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            raise StateDictError(f"{name} is a partial sum", fix="redistribute it before loading")
        return value.full_tensor()
    return value


def mirror(
    model: nn.Module, root: Container, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]
) -> None:
    """Give `root` the hierarchy of `model`, with these tensors by the model's names (tied ones by their first name).

    What is shared in the model, module or tensor, is shared here. Parameters that are not given are elsewhere: None.
    """
    tensors = {id(tensor): parameters[name] for name, tensor in model.named_parameters() if name in parameters}
    own_buffers: dict[int, Tensor] = {id(tensor): buffers[name] for name, tensor in model.named_buffers()}
    containers: dict[int, Container] = {id(model): root}
    for module in model.modules():
        containers.setdefault(id(module), Container())
    for module in model.modules():
        container = containers[id(module)]
        container.training = module.training
        for name, child in module._modules.items():
            container._modules[name] = None if child is None else containers[id(child)]
        for name, parameter in module._parameters.items():
            held = None if parameter is None else tensors.get(id(parameter))
            container._parameters[name] = held
            if parameter is not None and held is None:
                container.elsewhere.add(name)
        for name, buffer in module._buffers.items():
            container._buffers[name] = None if buffer is None else own_buffers[id(buffer)]
        container._non_persistent_buffers_set.update(module._non_persistent_buffers_set)


def training_flags(module: nn.Module) -> tuple[bool, ...]:
    return tuple(child.training for child in module.modules())


@contextmanager
def modes_of(mirrored: nn.Module, model: nn.Module) -> Iterator[None]:
    """In here `model` has the training flags and the requires_grad of its mirror; afterwards its own again."""
    modules, tensors = list(model.modules()), list(model.parameters())
    before = [module.training for module in modules], [tensor.requires_grad for tensor in tensors]
    now = training_flags(mirrored), [tensor.requires_grad for tensor in mirrored.parameters()]
    _set_modes(modules, tensors, *now)
    try:
        yield
    finally:
        _set_modes(modules, tensors, *before)


@contextmanager
def training_of(mirrored: nn.Module, model: nn.Module) -> Iterator[None]:
    """In here `model` has the training flags of its mirror, which may lack parameters; afterwards its own again."""
    modules, tensors = list(model.modules()), list[nn.Parameter]()
    before = [module.training for module in modules]
    _set_modes(modules, tensors, training_flags(mirrored), ())
    try:
        yield
    finally:
        _set_modes(modules, tensors, before, ())


def _set_modes(modules: list[nn.Module], tensors: list[nn.Parameter], training: Any, requires_grad: Any) -> None:
    for module, flag in zip(modules, training, strict=True):
        module.training = flag
    for tensor, flag in zip(tensors, requires_grad, strict=True):
        tensor.requires_grad_(flag)
