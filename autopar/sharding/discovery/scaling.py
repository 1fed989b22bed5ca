"""A call in other sizes: equal sizes stay equal, sizes among the arguments follow, the result keeps its form."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any

import torch

from autopar.sharding.op_call import OpCall, TensorSpec, is_spec, walk

Sizes = tuple[int, ...]
BASE_SIZES: Sizes = (4, 6, 8, 10, 14, 16, 18, 22)  # small sizes in the order of the real ones; no two are alike
MOST_CLASSES = len(BASE_SIZES)
MOST_SETTINGS = 64  # ways to make a call small that are tried
MOST_ELEMENTS = 1 << 17  # of all inputs of a trial together
MOST_REAL_ELEMENTS = 1 << 18  # of all tensors of a trial in real sizes together
_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


class Naming(Enum):
    """Which integers among the arguments name a size, and so change with it, where they equal one."""

    NONE = auto()
    LISTS = auto()
    ALL = auto()


class Precision(Enum):
    """In which dtype floating-point inputs are made."""

    WIDE = auto()  # double: differences are those of the op, not of rounding
    OWN = auto()


@dataclass(frozen=True)
class Setting:
    """How a call is made small. `kept`: sizes that stay as they are, because the op runs in no others."""

    kept: frozenset[int]
    naming: Naming
    precision: Precision


@dataclass(frozen=True)
class Problem:
    """A call with the tensors left open."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    device: str

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return tuple(leaf for leaf in walk((self.args, dict(self.kwargs))) if is_spec(leaf))

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.inputs)

    @cached_property
    def _is_flat(self) -> bool:
        """Whether all arguments are positional tensors."""
        return not self.kwargs and all(map(is_spec, self.args))

    def arguments(self, tensors: list[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with these tensors in them."""
        if self._is_flat:
            return tuple(tensors), {}
        queue = iter(tensors)

        def filled(value: Any) -> Any:
            if isinstance(value, TensorSpec):
                return next(queue)
            if isinstance(value, tuple):
                return [filled(item) for item in value]
            return torch.device(self.device) if isinstance(value, torch.device) else value

        args = tuple(filled(value) for value in self.args)
        return args, {name: filled(value) for name, value in self.kwargs}

    def run(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...] | None:
        """The op's flat outputs; None where it does not run on such tensors."""
        args, kwargs = self.arguments(tensors)
        try:
            value = self.target(*args, **kwargs)
        except Exception:  # an op, a user's among them, may raise anything on inputs that it cannot take
            return None
        return (value,) if isinstance(value, torch.Tensor) else tuple(walk(value))


def size_classes(call: OpCall, naming: Naming = Naming.NONE) -> tuple[int, ...]:
    """The distinct sizes above one, small ones first; with those of outputs that an argument names."""
    sizes = {size for spec in call.inputs for size in spec.shape}
    named = {
        number for number, in_list in integers(call) if naming is Naming.ALL or (naming is not Naming.NONE and in_list)
    }
    made = {size for spec in call.outputs if spec is not None for size in spec.shape}
    return tuple(sorted(size for size in sizes | (made & named) if size > 1))


def integers(call: OpCall) -> Iterator[tuple[int, bool]]:
    """Integers among the arguments, and whether each stands in a list."""

    def found(value: Any, *, in_list: bool) -> Iterator[tuple[int, bool]]:
        if isinstance(value, tuple):
            for item in value:
                yield from found(item, in_list=True)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield value, in_list

    for value in (*call.args, *(item for _, item in call.kwargs)):
        yield from found(value, in_list=False)


def namings(call: OpCall) -> tuple[Naming, ...]:
    """The namings that differ for this call."""
    every = {size for spec in (*call.inputs, *call.outputs) if spec is not None for size in spec.shape if size > 1}
    equal = [in_list for number, in_list in integers(call) if number in every]
    lists = (Naming.LISTS,) if any(equal) else ()
    scalars = (Naming.ALL,) if not all(equal) else ()
    return (Naming.NONE, *lists, *scalars)


def settings(call: OpCall) -> Iterator[Setting]:
    """Ways to make a call small: first those that keep no size, in double precision where that differs."""
    classes = size_classes(call, Naming.ALL)
    if len(classes) > MOST_CLASSES:
        return
    widens = any(spec.dtype in _WIDER for spec in call.inputs)
    precisions = (Precision.WIDE, Precision.OWN) if widens else (Precision.OWN,)
    for count in range(len(classes) + 1):
        for kept in itertools.combinations(classes, count):
            for precision, naming in itertools.product(precisions, namings(call)):
                yield Setting(frozenset(kept), naming, precision)


def small_sizes(call: OpCall, setting: Setting, row: Sizes, given: Mapping[int, int]) -> dict[int, int]:
    """New size by size: as given, kept, or the next of the row."""
    classes = size_classes(call, setting.naming)
    small = dict(zip(classes, row, strict=False))
    return small | {size: size for size in classes if size in setting.kept} | dict(given)


def reduced_sizes(call: OpCall, naming: Naming) -> dict[int, int]:
    """The real sizes, the largest of them halved until all tensors together are affordable."""
    sizes = {size: size for size in size_classes(call, naming)}
    while sum(_numel(spec, sizes) for spec in (*call.inputs, *call.outputs) if spec is not None) > MOST_REAL_ELEMENTS:
        largest = max(sizes, key=sizes.__getitem__)
        if sizes[largest] <= BASE_SIZES[-1]:
            break
        sizes[largest] = max(size for size in range(2, sizes[largest] // 2 + 1) if size not in sizes.values())
    return sizes


def _numel(spec: TensorSpec, sizes: Mapping[int, int]) -> int:
    return math.prod(sizes.get(size, size) for size in spec.shape)


def scaled(call: OpCall, setting: Setting, sizes: Mapping[int, int], device: str) -> Problem:
    """The call in other sizes."""

    def value_of(value: Any, *, in_list: bool) -> Any:
        if isinstance(value, TensorSpec):
            dtype = _WIDER.get(value.dtype, value.dtype) if setting.precision is Precision.WIDE else value.dtype
            return TensorSpec(tuple(sizes.get(size, size) for size in value.shape), dtype)
        if isinstance(value, tuple):
            return tuple(value_of(item, in_list=True) for item in value)
        named = setting.naming is Naming.ALL or (setting.naming is Naming.LISTS and in_list)
        return sizes.get(value, value) if named and type(value) is int else value

    args = tuple(value_of(value, in_list=False) for value in call.args)
    kwargs = tuple((name, value_of(value, in_list=False)) for name, value in call.kwargs)
    return Problem(call.target, args, kwargs, device)


def has_form(
    call: OpCall, sizes: Mapping[int, int], outputs: tuple[torch.Tensor | None, ...], precision: Precision
) -> bool:
    """Whether the outputs relate to the inputs' sizes as those of the real call do: a size equal to an input's is so
    still, one that was not is not now. Otherwise the small call is another case of the op than the real one."""
    if len(outputs) != len(call.outputs):
        return False
    return all(map(lambda spec, value: _same_form(spec, value, sizes, precision), call.outputs, outputs))


def _same_form(spec: TensorSpec | None, value: object, sizes: Mapping[int, int], precision: Precision) -> bool:
    if spec is None or not isinstance(value, torch.Tensor):
        return spec is None and value is None
    if value.dim() != len(spec.shape) or value.layout is not torch.strided:
        return False
    dtypes = {spec.dtype, _WIDER.get(spec.dtype, spec.dtype) if precision is Precision.WIDE else spec.dtype}
    return value.dtype in dtypes and all(
        map(lambda real, small: _same_size(real, small, sizes), spec.shape, value.shape)
    )


def _same_size(real: int, small: int, sizes: Mapping[int, int]) -> bool:
    if real in sizes or real <= 1:
        return small == sizes.get(real, real)
    return small > 1 and small not in sizes.values()
