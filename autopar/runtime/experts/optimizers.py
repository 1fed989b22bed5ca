"""The optimizers of a module's experts: found when they step, their state moved with the weights, saved in the model's
own order."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import UnsupportedOptionError
from autopar.runtime.experts.order import ExpertOrder


class OptimizerWatch:
    """Knows every optimizer that has stepped, or was attached, and holds any of the watched parameters.

    PyTorch tells it of every optimizer's step, as long as it lives. `orders`: by identity of a parameter, those that
    are not in the model's own order.
    """

    def __init__(self) -> None:
        self.parameters: dict[int, Tensor] = {}
        self.orders: dict[int, ExpertOrder] = {}
        self.known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        this = weakref.ref(self)

        def note(optimizer: Optimizer, *_: Any) -> None:
            watch = this()
            if watch is not None:
                watch.note(optimizer)

        handle = register_optimizer_step_pre_hook(note)
        weakref.finalize(self, handle.remove)

    def note(self, optimizer: Optimizer) -> None:
        """Remember the optimizer if it is of these parameters, and not the one inside of one that is known."""
        if any(optimizer is item for known in self.known for item in _nested(known)):
            return
        if not any(id(item) in self.parameters for item in _parameters(optimizer)):
            return
        if any(id(item) in self.orders for item in optimizer.state):
            raise UnsupportedOptionError(
                f"{type(optimizer).__name__} holds state of experts that were moved, from before it was known here",
                fix="call pmodel.attach_optimizer(optimizer) when you make it, before its load_state_dict",
            )
        self.known.add(optimizer)
        this = weakref.ref(self)

        def saved(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
            watch = this()
            return watch.in_model_order(optimizer, state_dict) if watch is not None else None

        def loaded(optimizer: Optimizer) -> None:
            watch = this()
            if watch is not None:
                watch.put_in_rows(optimizer)

        optimizer.register_state_dict_post_hook(saved)
        optimizer.register_load_state_dict_post_hook(loaded)

    def states(self, parameter: Tensor) -> list[Tensor]:
        """The state tensors with a row for each expert of a parameter, each once.

        Raises UnsupportedOptionError for a state of which it is not known what an expert's part is.
        """
        found: dict[int, Tensor] = {}
        for optimizer in sorted(self.known, key=lambda item: type(item).__name__):
            for name, value in optimizer.state.get(parameter, {}).items():
                if has_rows(optimizer, parameter, name, value):
                    _check_is_beside(optimizer, parameter, value)
                    found[id(value)] = value
        return list(found.values())

    def in_model_order(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What the optimizer's `state_dict()` returns, with the experts in the model's order. Called on all ranks."""
        state = dict(state_dict["state"])
        for index, parameter in enumerate(_parameters(optimizer)):
            order = self.orders.get(id(parameter))
            if order is not None and index in state:
                state[index] = {
                    name: order.in_model_order(value) if has_rows(optimizer, parameter, name, value) else value
                    for name, value in state[index].items()
                }
        return {**state_dict, "state": state}

    def put_in_rows(self, optimizer: Optimizer) -> None:
        """A state that was just loaded, in the model's order, is brought to the order of the rows."""
        for parameter in _parameters(optimizer):
            order, state = self.orders.get(id(parameter)), optimizer.state.get(parameter)
            if order is not None and state:
                for name, value in state.items():
                    if has_rows(optimizer, parameter, name, value):
                        state[name] = order.in_rows(value)


def has_rows(optimizer: Optimizer, parameter: Tensor, name: str, value: Any) -> bool:
    """Whether a state has a row for each row of its parameter, as moments and factors of them have.

    Not so numbers, and what is one long along dim 0: they belong to all experts.
    """
    if not isinstance(value, (Tensor, list, tuple, Mapping)) or (isinstance(value, Tensor) and value.numel() == 1):
        return False
    if isinstance(value, Tensor) and value.dim() == parameter.dim():
        pairs = zip(value.shape, parameter.shape, strict=True)
        if all(size in (1, full) for size, full in pairs):
            return value.shape[0] == parameter.shape[0]
    what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise UnsupportedOptionError(
        f"state {name!r} of {type(optimizer).__name__} is {what}, for a parameter of shape {tuple(parameter.shape)}: "
        "which part is whose expert's is not known",
        fix="train experts that are to be moved with an optimizer whose state has a row for each expert, as that of "
        "torch.optim.AdamW, SGD, Adafactor and autopar.optim.SM3",
    )


def _check_is_beside(optimizer: Optimizer, parameter: Tensor, value: Tensor) -> None:
    """Raise UnsupportedOptionError for a state that is not on its parameter's device."""
    held, weight = (item.to_local() if isinstance(item, DTensor) else item for item in (value, parameter))
    if held.device.type != weight.device.type:
        raise UnsupportedOptionError(
            f"state of {type(optimizer).__name__} lies on the host, and experts that are moved take theirs along",
            fix="train experts that are to be moved with the optimizer inside of HostState",
        )


def _nested(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimizer, the one inside of it, the one inside of that: `autopar.optim` calls them `inner`."""
    found: Any = optimizer
    while isinstance(found, Optimizer):
        yield found
        found = getattr(found, "inner", None)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """In the order in which its state_dict numbers them."""
    for group in optimizer.param_groups:
        yield from group["params"]
