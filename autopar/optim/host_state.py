"""Optimizer state in host memory, for any optimizer: on the device only while a parameter is stepped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from autopar.errors import UnsupportedOptionError
from autopar.ops import packing as _packing  # noqa: F401  (registers the ops)
from autopar.optim.closure_step import ClosureStep
from autopar.optim.cut import local_of
from autopar.torch_compat import dtensor_of, run_load_hooks

State = dict[str, Any]
Groups = Sequence[Mapping[str, Any]]
OFFLOAD, RELOAD = torch.ops.autopar.offload.default, torch.ops.autopar.reload.default
WAIT_COPY = torch.ops.autopar.wait_copy.default


class HostState(ClosureStep):
    """Steps one parameter after the other, with an optimizer whose state lies on the host in between.

    `HostState(pmodel.parameters(), torch.optim.AdamW, lr=3e-4)`; to count its state when planning, give
    `optimizer=functools.partial(HostState, optimizer=torch.optim.AdamW)`. What is computed is, bit for bit, what the
    optimizer computes: it still runs on the device, on state that is copied there and back, through pinned memory.
    While the state of one parameter goes back, that of the next one comes: the device holds that of two at most. Step
    counts, and other state without dims, stay where they are. With ZeRO stage 1, this is the optimizer inside:
    `ShardedState(pmodel.parameters(), functools.partial(HostState, optimizer=torch.optim.AdamW))`.

    Raises UnsupportedOptionError for an optimizer that computes something else when it steps one parameter at a time,
    as LBFGS; two small parameters are stepped to find out.

    Source: Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021, which computes the
    step on the host as well; here the device does.
    """

    def __init__(self, params: ParamsT, optimizer: Callable[..., Optimizer], **options: Any) -> None:
        """`optimizer`: a class or factory, called with parameters (or groups of them) and the options."""
        super().__init__(params, {})
        _check(optimizer, options)
        self.inner = optimizer([{**group, "params": list(group["params"])} for group in self.param_groups], **options)
        self.defaults = self.inner.defaults
        for parameter, state in self.inner.state.items():  # what is kept from the start
            self.inner.state[parameter] = _there(_to_host(state))
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step these parameters too."""
        super().add_param_group(param_group)
        if "inner" in self.__dict__:
            group = self.param_groups[-1]
            self.inner.add_param_group({**group, "params": list(group["params"])})
            self._share()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this optimizer, or of the one inside, has saved; the device holds one at a time."""
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        self.inner.load_state_dict({**state_dict, "state": {}})
        found: defaultdict[Tensor, Any] = defaultdict(dict)
        for parameter, number in zip(own, numbers, strict=True):
            if number in state_dict["state"]:
                found[parameter] = self._loaded(parameter, state_dict["state"][number])
        self.inner.state = found
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            ours.update({name: value for name, value in theirs.items() if name != "params"})
        self._share()
        run_load_hooks(self)

    def _loaded(self, parameter: Tensor, saved: State) -> State:
        place = next(
            place for place, group in enumerate(self.param_groups) if any(parameter is it for it in group["params"])
        )
        with _alone(self.inner, self.inner.param_groups.copy(), place, parameter):
            groups = [
                {**group, "params": [0] if number == place else []}
                for number, group in enumerate(self.inner.param_groups)
            ]
            self.inner.load_state_dict({"state": {0: saved}, "param_groups": groups})
            return _there(_to_host(self.inner.state[parameter]))

    def _share(self) -> None:
        """Show the inner optimizer's options and state as this one's."""
        self.state = self.inner.state
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            for name, value in theirs.items():
                ours.setdefault(name, value)

    def _step(self) -> None:
        order = [
            (place, parameter)
            for place, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        coming = [self._coming(parameter) for _, parameter in order[:1]]
        for number, (place, parameter) in enumerate(order):
            state = _there(coming.pop())
            if state:
                self.inner.state[parameter] = _laid_out(state, parameter)
            with _alone(self.inner, self.param_groups, place, parameter):
                self.inner.step()
            going = _to_host(self.inner.state.pop(parameter, {}))
            coming = [self._coming(following) for _, following in order[number + 1 : number + 2]]
            if going:
                self.inner.state[parameter] = _there(going)
            del state, going  # what they hold of the device is the next parameter's
        for device in {local_of(parameter).device for _, parameter in order}:
            if device.type != "cpu":
                torch.accelerator.current_stream(device).synchronize()  # the host may read its state from here on

    def _coming(self, parameter: Tensor) -> State:
        """The state of a parameter on its way to the device."""
        device = local_of(parameter).device
        return {name: _copying(value, RELOAD, device) for name, value in self.inner.state.get(parameter, {}).items()}


@dataclass(frozen=True)
class _Copy:
    """A tensor on its way. `source`: what this rank holds of it, which lives until the copy is complete."""

    value: Tensor
    source: Tensor
    copy: Tensor

    def arrived(self) -> Tensor:
        local: Tensor = WAIT_COPY(self.copy, self.source)
        value = self.value
        if not isinstance(value, DTensor):
            return local
        layout, shape, stride = value.placements, value.shape, value.stride()
        return dtensor_of(local, value.device_mesh, layout, shape, stride)


def _copying(value: Any, op: Any, *device: torch.device) -> Any:
    if not isinstance(value, Tensor) or not value.dim():
        return value
    source = local_of(value)
    return _Copy(value, source, op(source, *device))


def _to_host(state: Mapping[str, Any]) -> State:
    """The state of a parameter on its way to the host."""
    return {name: _copying(value, OFFLOAD) for name, value in state.items()}


def _there(state: Mapping[str, Any]) -> State:
    """State that was on its way."""
    return {name: value.arrived() if isinstance(value, _Copy) else value for name, value in state.items()}


def _laid_out(state: State, parameter: Tensor) -> State:
    """State tensors as long as the parameter in the layout that it has; others are brought there by their optimizer."""
    if not isinstance(parameter, DTensor):
        return state
    return {
        name: value.redistribute(parameter.device_mesh, parameter.placements)
        if isinstance(value, DTensor) and value.shape == parameter.shape
        else value
        for name, value in state.items()
    }


@contextmanager
def _alone(inner: Optimizer, groups: Groups, place: int, parameter: Tensor) -> Iterator[None]:
    """An optimizer with one parameter of one group, and with the options of `groups`; then with all of theirs again."""
    whole = [list(group["params"]) for group in groups]
    for number, (ours, theirs) in enumerate(zip(groups, inner.param_groups, strict=True)):
        theirs.update({name: value for name, value in ours.items() if name != "params"})
        theirs["params"] = [parameter] if number == place else []
    try:
        yield
    finally:
        for parameters, theirs in zip(whole, inner.param_groups, strict=True):
            theirs["params"] = parameters


def _check(optimizer: Callable[..., Optimizer], options: Mapping[str, Any]) -> None:
    """Raise UnsupportedOptionError unless an optimizer steps parameters one by one as it steps them together."""
    try:
        pairs = zip(*(_stepped(optimizer, options, one_by_one=alone) for alone in (False, True)), strict=True)
        same = all(torch.equal(together, alone) for together, alone in pairs)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise UnsupportedOptionError(
            f"HostState cannot step two small matrices with {optimizer!r}: {error}",
            fix="give an optimizer class, or a factory of one, whose step takes no arguments",
        ) from error
    if not same:
        raise UnsupportedOptionError(
            f"{optimizer!r} computes something else when it steps one parameter at a time, as HostState does",
            fix="use it as it is; if it is ShardedState, put HostState inside of it",
        )


def _stepped(optimizer: Callable[..., Optimizer], options: Mapping[str, Any], *, one_by_one: bool) -> list[Tensor]:
    """Two small matrices after two steps."""
    values = torch.linspace(-1, 3, 25, dtype=torch.float64)  # so precise that small differences show
    parameters = [nn.Parameter(values[:15].reshape(3, 5)), nn.Parameter(values[15:].reshape(5, 2))]
    inner = optimizer([{"params": [parameter]} for parameter in parameters], **options)
    for factor in (0.5, -0.25):
        for parameter in parameters:
            parameter.grad = factor * parameter.detach()
        groups = [{**group, "params": list(group["params"])} for group in inner.param_groups]
        for place, parameter in enumerate(parameters if one_by_one else ()):
            with _alone(inner, groups, place, parameter):
                inner.step()
        if not one_by_one:
            inner.step()
    return [parameter.detach() for parameter in parameters]
