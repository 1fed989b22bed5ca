"""Runs of a model beside it: on a copy, or where it cannot be copied, on tensors in place of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from autopar.capture.precision import Precision

Module = TypeVar("Module", bound=nn.Module)


def twin_of(model: Module) -> Module:
    """A deep copy, in which tensors that a forward left in attributes, as old-style weight norm does, are plain values.

    Raises what `copy.deepcopy` raises for a model that holds what cannot be copied, as a lock or a process group.
    """
    held = (leaf for module in model.modules() for leaf in pytree.tree_leaves(list(vars(module).values())))
    computed = {id(leaf): leaf for leaf in held if isinstance(leaf, Tensor) and not leaf.is_leaf}
    return copy.deepcopy(model, {key: leaf.detach().clone() for key, leaf in computed.items()})


@dataclass(frozen=True)
class RunApart:
    """What a call of a model gave, and the copies of its parameters and buffers that it ran on, by name."""

    result: Any
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def run_apart(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], precision: Precision | None = None
) -> RunApart:
    """`model(*args, **kwargs)` on copies of its tensors; the model, its gradients and attributes stay as they are."""
    try:
        twin = twin_of(model)
    except Exception:  # whatever an object that the model holds raises when it is to be copied
        return _run_on_copies(model, args, kwargs, precision)
    twin.zero_grad()
    own: dict[str, Tensor] = dict(twin.named_parameters())
    result = twin(*args, **kwargs) if precision is None else precision.run(twin, args, kwargs, own)
    return RunApart(result, own, dict(twin.named_buffers()))  # of a module met twice, the twin may now hold casts


def _run_on_copies(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], precision: Precision | None
) -> RunApart:
    names = [name for name, _ in model.named_parameters()]
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {name: item.detach().clone().requires_grad_(item.requires_grad) for name, item in own.items()}
    with _attributes_kept(model):
        if precision is not None:
            result = precision.run(model, args, kwargs, state)
        else:
            result = functional_call(model, state, args, kwargs)  # writes buffers that are assigned back into `state`
    parameters = {name: state.pop(name) for name in names}
    return RunApart(result, parameters, state)


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards every module has the attributes that it had, and its lists and dicts what they held."""
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    contents = [
        (value, value.copy()) for _, held in attributes for value in held.values() if type(value) in (list, dict)
    ]
    try:
        yield
    finally:
        for now, before in (*attributes, *contents):
            now.clear()
            now.update(before) if isinstance(now, dict) else now.extend(before)
