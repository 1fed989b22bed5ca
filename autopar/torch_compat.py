"""The private PyTorch names that autopar needs, in one place (tested against torch 2.11 and 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.tensor import DTensor
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "LazyGraphModule",
    "TorchDispatchMode",
    "after_backward",
    "autograd_sequence_number",
    "below_functions",
    "lazy_graph_modules",
    "make_fx",
    "outside_tracing",
    "set_dtensor_content",
    "traced_node_count",
    "without_dispatch",
]


def traced_node_count() -> int:
    """How many nodes the graph under trace has; 0 when nothing is traced."""
    mode = get_proxy_mode()
    return 0 if mode is None else len(mode.tracer.graph.nodes)


def autograd_sequence_number() -> int:
    """The number that the next autograd node will carry."""
    return int(torch._C._autograd._get_sequence_nr())


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Torch calls in here run for real: no dispatch mode, no torch-function mode sees them."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def below_functions() -> AbstractContextManager[object]:
    """Entered inside a tracer: torch-function modes see the calls of the program under trace, not those that tracing
    makes for each op, which are twenty times as many."""
    return _BelowFunctions()  # type: ignore[no-untyped-call]


class _BelowFunctions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


def lazy_graph_modules() -> AbstractContextManager[None]:
    """Graph modules that `make_fx` makes in here generate their code when it is first asked for."""
    return _use_lazy_graph_module(True)


@contextmanager
def without_dispatch() -> Iterator[None]:
    """Torch calls in here go to the kernels of their tensors' devices, past every mode, `FakeTensorMode` included."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def set_dtensor_content(tensor: DTensor, content: DTensor) -> None:
    """Let `tensor` hold the shard and the placements of `content`: same shape, same object as before."""
    tensor._local_tensor, tensor._spec = content._local_tensor, content._spec


def after_backward(callback: Callable[[], None]) -> None:
    """Called in an autograd node: run `callback` when the whole backward pass is done."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
