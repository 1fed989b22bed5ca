"""Watches a traced run: which module and which line of the user's made each node, in forward and in backward."""

from __future__ import annotations

import functools
import types
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from autopar.source import calling_line
from autopar.torch_compat import FakeTensor, autograd_sequence_number

PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)  # whose attributes are answered by themselves
Where = tuple[str, int, str]
Replace = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node came from: the module's dotted path and the user's line."""

    module: str
    where: Where | None


@dataclass(frozen=True, slots=True)
class _Event:
    """Nodes [first, last) were made by one torch function, whose autograd nodes have numbers below `sequence`."""

    first: int
    last: int
    origin: Origin
    sequence: int


def _never(*_: object) -> bool:
    return False


@functools.lru_cache(maxsize=1024)
def without_override_check(function: types.FunctionType) -> types.FunctionType | None:
    """`function` with its `has_torch_function` checks answered "no", so that a mode sees the functions it calls.

    None if it has no such check; nor for methods of Tensor, whose `super()` calls a mode sees as themselves.
    """
    names = function.__code__.co_names
    checks = [name for name in names if name.startswith("has_torch_function") and name in function.__globals__]
    if not checks or function.__module__ == "torch._tensor":
        return None
    scope = {**function.__globals__, **dict.fromkeys(checks, _never)}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class Observer(TorchFunctionMode):
    """Active while the joint program is traced. `replace` may answer a torch function call with another computation.

    `nodes`: those recorded so far, which others append to.
    """

    def __init__(self, model: nn.Module, replace: Replace, nodes: Sequence[fx.Node]) -> None:
        super().__init__()
        self._model, self._replace, self._nodes = model, replace, nodes
        self._modules: list[str] = [""]
        self._line: Where | None = None  # that what runs now belongs to, if it is not the one that calls
        self._events: list[_Event] = []
        self._backward: list[tuple[int, int]] = []  # (first node, sequence number of the autograd node that ran)

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__" and type(args[0]) in PLAIN:  # an attribute as `shape`: no op
            return func(*args)
        kwargs = kwargs or {}
        first = len(self._nodes)
        with self:  # what `replace` and Python-level functions call is seen as well
            result = self._replace(func, args, kwargs)
            inner = without_override_check(func) if isinstance(func, types.FunctionType) else None
            if result is NotImplemented and inner is not None:
                result = inner(*args, **kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
        last = len(self._nodes)
        if last > first and func is not torch.autograd.grad:
            origin = Origin(self._modules[-1], self._line or calling_line())
            self._events.append(_Event(first, last, origin, autograd_sequence_number()))
        return result

    @contextmanager
    def watching_modules(self) -> Iterator[None]:
        """Forward hooks on every module keep the path of the one that runs; they are gone afterwards."""
        handles = []
        for name, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(functools.partial(self._enter, name), prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def inside(self, module: str) -> Iterator[None]:
        """What is made in here comes from that module, though none of its code runs."""
        self._enter(module)
        try:
            yield
        finally:
            self._leave()

    def resuming(self, line: Where | None) -> Callable[[], AbstractContextManager[None]]:
        """Makes contexts in which nodes come from that line and the module that runs now."""
        return functools.partial(self._resumed, self._modules[-1], line)

    @contextmanager
    def _resumed(self, module: str, line: Where | None) -> Iterator[None]:
        before, self._line = self._line, line
        try:
            with self.inside(module):
                yield
        finally:
            self._line = before

    def _enter(self, name: str, *_: object) -> None:
        self._modules.append(name)

    def _leave(self, *_: object) -> None:
        self._modules.pop()

    def watch_backward(self, roots: list[torch.Tensor]) -> None:
        """Record, for every autograd node below `roots`, the graph position at which it starts to run."""
        pending = [root.grad_fn for root in roots if root.grad_fn is not None]
        seen = set(pending)
        while pending:
            node = pending.pop()
            node.register_prehook(functools.partial(self._ran, node._sequence_nr()))
            for parent, _ in node.next_functions:
                if parent is not None and parent not in seen:
                    seen.add(parent)
                    pending.append(parent)

    def _ran(self, sequence: int, *_: object) -> None:
        self._backward.append((len(self._nodes), sequence))

    def origins(self, nodes: list[fx.Node], boundary: int) -> list[Origin | None]:
        """Per node its origin: forward nodes by the function that made them, backward ones by their forward's."""
        found: list[Origin | None] = [None] * len(nodes)
        forward = [event for event in self._events if event.first < boundary]
        recomputed = [event for event in self._events if event.first >= boundary and event.origin.module]
        for event in forward + recomputed:  # an inner function ends, and is recorded, before the one around it
            for index in range(event.first, event.last):
                found[index] = found[index] or event.origin
        numbers = [event.sequence for event in forward]
        edges = [first for first, _ in self._backward[1:]] + [len(nodes)][
            : len(self._backward)
        ]  # none without gradients
        for (first, sequence), last in zip(self._backward, edges, strict=True):
            event_index = bisect_left(numbers, sequence + 1)
            if event_index < len(forward):
                for index in range(max(first, boundary), last):
                    found[index] = found[index] or forward[event_index].origin
        return found
