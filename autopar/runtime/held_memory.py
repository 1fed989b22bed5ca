"""What a rank holds while a recorded step runs: what an accelerator's allocator says; on a CPU, counted by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from autopar.passes.collectives import is_wait
from autopar.runtime.memory_tracker import OFFLOAD, MemoryTracker, until_let_go


class HeldMemory(Protocol):
    """Bytes held on the device of one rank during one step."""

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """These are there, too."""

    def begin(self) -> None:
        """An op begins."""

    def after(self, node: fx.Node, value: Any) -> int:
        """The most bytes held since the op began, which has returned `value`."""

    def of_program(self) -> AbstractContextManager[None]:
        """A context in which a program runs as a whole."""

    def most_bytes(self) -> int:
        """The most bytes held in that context."""


def held_memory(device_type: str, standing: Sequence[Tensor], on_host: Sequence[Tensor] = ()) -> HeldMemory:
    """For one step. `standing`: what is held already; `on_host`: what lies on the host, which counts apart."""
    if device_type != "cpu":
        return AllocatorMemory()
    memory = CountedMemory()
    memory.tracker.hold(on_host, on_host=True)
    memory.hold(standing)
    return memory


class AllocatorMemory:
    """What PyTorch's allocator has given out on the device, to whomever; its own peak begins anew at every op."""

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """The allocator knows them."""

    def begin(self) -> None:
        torch.accelerator.reset_peak_memory_stats()

    def after(self, node: fx.Node, value: Any) -> int:
        return self.most_bytes()

    @contextmanager
    def of_program(self) -> Iterator[None]:
        self.begin()
        yield

    def most_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated())


class CountedMemory:
    """The storages of the tensors that are held, read or made, each once; what kernels need inside is not seen."""

    def __init__(self) -> None:
        self.tracker = _OfAllRead()

    def hold(self, tensors: Sequence[Tensor]) -> None:
        self.tracker.hold(tensors)

    def begin(self) -> None:
        self.tracker.reset_peak()

    def after(self, node: fx.Node, value: Any) -> int:
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        if is_wait(node):
            until_let_go((), leaves[0])
        self.tracker.hold(leaves, on_host=node.target is OFFLOAD)
        return self.tracker.live_bytes

    @contextmanager
    def of_program(self) -> Iterator[None]:
        self.begin()
        with self.tracker:
            yield

    def most_bytes(self) -> int:
        return self.tracker.peak_bytes


class _OfAllRead(MemoryTracker):
    """Counts what ops read as well: tensors that arrived from other ranks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not OFFLOAD:
            self.hold([leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
        return super().__torch_dispatch__(func, types, args, kwargs)


class SteppedOptimizers:
    """The optimizers that step while this is entered."""

    def __init__(self) -> None:
        self.optimizers: dict[int, Optimizer] = {}

    def __enter__(self) -> SteppedOptimizers:
        self._handle = register_optimizer_step_post_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        self.optimizers[id(optimizer)] = optimizer

    def state_of(self, parameter: Tensor) -> list[Tensor]:
        """What any of them keeps of a parameter."""
        states = [optimizer.state.get(parameter, {}) for optimizer in self.optimizers.values()]
        return [leaf for leaf in pytree.tree_leaves(states) if isinstance(leaf, Tensor)]


def local_parts(tensors: Sequence[Tensor], device_type: str) -> list[Tensor]:
    """What this rank holds of them on its device."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [part for part in parts if part.device.type == device_type]
