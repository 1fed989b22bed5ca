"""Ops on fake tensors, each signature worked out once: the layers of a model repeat the same calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.torch_compat import FakeTensor, FakeTensorMode, broadcast_shapes, without_dispatch

FRESH = -1
aten = torch.ops.aten
_NORMS = (aten.native_layer_norm.default, aten.native_group_norm.default)
_LOSSES = (
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Result:
    """What a call returned: the form of a strided tensor, and which tensor argument it is a view of (or FRESH)."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    device: torch.device
    base: int


class _Unknown(Exception):
    """An argument or result that is not described by what a key holds."""


class FakeCalls:
    """Calls ops on the fake tensors of one mode. What came out of a call serves the next one of the same signature:
    a new tensor of that form, or a view of the same argument's storage, as the op itself would have made it.

    In-place ops, constants whose value is known, and all but plain strided tensors are left to the mode.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._known: dict[Hashable, _Result | tuple[type, tuple[_Result | None, ...]]] = {}

    def __call__(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`target(*args, **kwargs)` under the mode."""
        if not isinstance(target, torch._ops.OpOverload):  # such as getitem: no op
            return target(*args, **kwargs)
        tensors: list[FakeTensor] = []
        key = _key_of(target, args, kwargs, tensors)
        known = None if key is None else self._known.get(key)
        if known is None:
            with self.mode:
                value = target(*args, **kwargs)
            if target in _NORMS:
                value = self._with_wide_statistics(value, args)
            if target in _LOSSES and value.dim() == 0:
                value = self._in_whole_storage(value, args)
            if key is not None:
                self._remember(key, value, tensors)
            return value
        with without_dispatch():
            if isinstance(known, _Result):
                return self._made(known, tensors)
            kind, items = known
            return kind(None if item is None else self._made(item, tensors) for item in items)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> FakeTensor:
        """A contiguous tensor of its own."""
        with without_dispatch():
            return FakeTensor(self.mode, torch.empty(shape, dtype=dtype, device="meta"), device)

    def alias(self, tensor: FakeTensor) -> FakeTensor:
        """Another tensor of the same form on the same storage, outside of autograd."""
        if not _is_plain(tensor):
            with self.mode:
                detached = tensor.detach()
            assert isinstance(detached, FakeTensor)
            return detached
        offset = int(tensor.storage_offset())
        form = _Result(tuple(tensor.shape), tensor.stride(), tensor.dtype, offset, tensor.fake_device, 0)
        with without_dispatch():
            return self._made(form, [tensor])

    def _with_wide_statistics(self, value: Any, args: tuple[Any, ...]) -> Any:
        """Of a norm of bf16 or fp16 with float32 weights: statistics in float32, as kernels of the CPU give them.

        PyTorch's fakes say the input's dtype.
        """
        dtypes = {item.dtype for item in args[1:] if isinstance(item, Tensor)}
        if value[0].device.type != "cpu" or dtypes != {torch.float32} or value[1].dtype == torch.float32:
            return value
        wide = (self.empty(tuple(item.shape), torch.float32, item.device) for item in value[1:])
        return value[0], *wide

    def _in_whole_storage(self, value: FakeTensor, args: tuple[Any, ...]) -> FakeTensor:
        """A reduced loss as kernels give it: in the storage of the elements' losses, which lives as long as it does.

        PyTorch's fakes say a storage of one element.
        """
        whole = self.empty(tuple(broadcast_shapes(args[0].shape, args[1].shape)), value.dtype, value.fake_device)
        form = _Result((), (), value.dtype, 0, value.fake_device, 0)
        with without_dispatch():
            return self._made(form, [whole])

    def _remember(self, key: Hashable, value: Any, tensors: list[FakeTensor]) -> None:
        bases = {tensor.untyped_storage()._cdata: index for index, tensor in enumerate(tensors)}
        try:
            if isinstance(value, (tuple, list)):
                items = tuple(None if item is None else _result(item, bases, tensors) for item in value)
                storages = [item.untyped_storage()._cdata for item in value if item is not None]
                if len({*storages} - bases.keys()) == sum(item is not None and item.base == FRESH for item in items):
                    self._known[key] = (type(value), items)
            else:
                self._known[key] = _result(value, bases, tensors)
        except _Unknown:
            return

    def _made(self, result: _Result, tensors: list[FakeTensor]) -> FakeTensor:
        if result.base == FRESH:
            content = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
        else:
            content = torch.empty(0, dtype=result.dtype, device="meta")
            storage = tensors[result.base].untyped_storage()
            content.set_(storage, result.offset, result.shape, result.stride)
        return FakeTensor(self.mode, content, result.device)


def _key_of(
    target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[FakeTensor]
) -> Hashable | None:
    """The signature of a call, its tensors gathered in `tensors`; None if the call must be made each time."""
    if target._schema.is_mutable:
        return None
    try:
        return target, torch.get_default_dtype(), _frozen(args, tensors), _frozen(kwargs, tensors)
    except _Unknown:
        return None


def _frozen(value: Any, tensors: list[FakeTensor]) -> Hashable:
    kind = type(value)
    if kind is FakeTensor:
        if not _is_plain(value) or value.constant is not None:
            raise _Unknown
        tensors.append(value)
        return tuple(value.shape), value.stride(), value.dtype, value.storage_offset(), value.fake_device
    if kind in _CONSTANTS:
        return kind, value  # 1, 1.0 and True are equal, but promote differently
    if isinstance(value, (tuple, list)):
        return tuple([_frozen(item, tensors) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _frozen(item, tensors)) for name, item in value.items()])
    raise _Unknown


_CONSTANTS = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _result(value: Any, bases: dict[int, int], tensors: list[FakeTensor]) -> _Result:
    if type(value) is not FakeTensor or not _is_plain(value) or value.constant is not None:
        raise _Unknown
    if any(value is tensor for tensor in tensors):
        raise _Unknown
    storage = value.untyped_storage()
    base = bases.get(storage._cdata, FRESH)
    shape, stride = tuple(value.shape), value.stride()
    if base == FRESH and storage.nbytes() != _bytes_of(shape, stride, value.dtype):
        raise _Unknown  # a view of something that the op keeps
    return _Result(shape, stride, value.dtype, int(value.storage_offset()), value.fake_device, base)


def _bytes_of(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> int:
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))) * dtype.itemsize
