"""Bytes over time: what is alive after each op, by kind, and where the peak is.

Takes in buffers with the op index that allocates and the one that frees them; gives back arrays and a peak. The
model is an upper bound: sizes are rounded up as the caching allocator does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from autopar.cost_models.formula import Formula, symbols
from autopar.cost_models.hardware import dtype_bytes
from autopar.errors import UnpricedError

Kind: TypeAlias = Literal[
    "parameter", "gradient", "optimizer_state", "activation", "saved", "gathered_weight", "collective", "buffer",
    "input", "temporary"
]  # fmt: skip
_element, _elements, _gradients, _state = symbols("element_bytes elements gradient_copies state_copies")
SHARD = Formula(
    "largest shard",
    _element * _elements,
    {"element_bytes": "B", "elements": ""},
    "torch.distributed.tensor: chunks of ceil(size / ranks), of which the first rank has the largest",
    result_unit="B",
)
TRAINED_SHARD = Formula(
    "largest shard with gradient and optimizer state",
    _element * _elements * (1 + _gradients + _state),
    {"element_bytes": "B", "elements": "", "gradient_copies": "", "state_copies": ""},
    "Rajbhandari et al., ZeRO, SC 2020, section 3.1; state: what the optimizer holds after one step",
    result_unit="B",
)
ALLOCATOR_BLOCK_BYTES = 512  # torch c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize
# nanotron_llama1b_grid.csv in benchmarks/data: reserved over allocated is 1 to 9 %, 3 % in the mean.
FRAGMENTATION_MARGIN = 0.03


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation: alive at every op index from `allocated_at` until just before `freed_at`.

    `freed_at` is the index of the first op that runs after it is gone; None keeps it to the end.
    """

    name: str
    kind: str
    bytes_: int
    allocated_at: int = 0
    freed_at: int | None = None
    where: str = ""  # the user's line


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bytes alive at each op index: in all, by kind, and the peak."""

    buffers: tuple[Buffer, ...]
    bytes_by_kind: Mapping[str, npt.NDArray[np.int64]]
    total_bytes: npt.NDArray[np.int64]
    peak_bytes: int
    peak_index: int

    def alive_at(self, index: int) -> tuple[Buffer, ...]:
        """The buffers alive while op `index` runs, largest first."""
        ops = len(self.total_bytes)
        alive = [item for item in self.buffers if item.allocated_at <= index < _end(item, ops)]
        return tuple(sorted(alive, key=lambda item: -item.bytes_))

    def alive_at_peak(self) -> tuple[Buffer, ...]:
        """The buffers alive at the peak, largest first."""
        return self.alive_at(self.peak_index)

    def peak_by_kind(self) -> dict[str, int]:
        """The bytes of each kind at the peak."""
        return {kind: int(values[self.peak_index]) for kind, values in self.bytes_by_kind.items()}


def liveness_timeline(buffers: Sequence[Buffer], ops: int) -> Timeline:
    """The bytes alive at each of `ops` op indices, with every buffer rounded up to the allocator's block."""
    if ops < 1:
        raise ValueError("a timeline needs at least one op")
    kinds = sorted({item.kind for item in buffers})
    changes = {kind: np.zeros(ops + 1, dtype=np.int64) for kind in kinds}
    for item in buffers:
        size, end = rounded_bytes(item.bytes_), _end(item, ops)
        if not 0 <= item.allocated_at <= end:
            raise ValueError(f"{item.name}: allocated at {item.allocated_at}, freed at {end}")
        changes[item.kind][min(item.allocated_at, ops)] += size
        changes[item.kind][end] -= size
    by_kind = {kind: np.cumsum(change)[:ops] for kind, change in changes.items()}
    total = np.sum(list(by_kind.values()), axis=0) if by_kind else np.zeros(ops, dtype=np.int64)
    peak = int(total.argmax())
    return Timeline(tuple(buffers), MappingProxyType(by_kind), total, int(total[peak]), peak)


def peak_bytes(buffers: Sequence[Buffer], ops: int) -> int:
    """The most bytes alive at any op."""
    return liveness_timeline(buffers, ops).peak_bytes


def rounded_bytes(size_bytes: int) -> int:
    """A size rounded up to the caching allocator's block."""
    return -(-size_bytes // ALLOCATOR_BLOCK_BYTES) * ALLOCATOR_BLOCK_BYTES


def reserved_bytes(allocated_bytes: int) -> int:
    """What the allocator holds from the device for this many bytes alive, fragmentation included."""
    return math.ceil(allocated_bytes * (1 + FRAGMENTATION_MARGIN))


# How many copies of the parameter each optimizer of torch.optim keeps (and the usual ones outside it): from the
# `state[...]` assignments of each class in torch 2.13 `torch/optim`.
_STATE_COPIES: Mapping[str, int] = MappingProxyType(
    {"sgd": 0, "momentum": 1, "sgd_momentum": 1, "adam": 2, "adamw": 2, "adamax": 2, "nadam": 2, "radam": 2,
     "adam_amsgrad": 3, "adamw_amsgrad": 3, "sparseadam": 2, "adagrad": 1, "adadelta": 2, "rmsprop": 1,
     "rprop": 2, "asgd": 1, "lion": 1, "muon": 1, "lamb": 2}
)  # fmt: skip
_QUANTIZED_BITS = MappingProxyType({"adam8bit": 8, "adamw8bit": 8, "adam4bit": 4, "adamw4bit": 4})
_QUANTIZED_BLOCK = 256  # elements that share one fp32 scale: bitsandbytes 8-bit optimizers
_QUANTIZED_MIN_ELEMENTS = 4096  # smaller tensors keep fp32 states: bitsandbytes `min_8bit_size`


def optimizer_state_bytes(
    parameter_bytes: int,
    optimizer_name: str,
    *,
    parameter_dtype: str = "float32",
    state_dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
) -> int:
    """Bytes of optimizer state for one parameter, as the optimizer really keeps it.

    torch's optimizers keep states in the parameter's dtype; `state_dtype` says otherwise. Factored optimizers
    (adafactor, sm3) need the parameter's `shape`.
    """
    name = optimizer_name.lower()
    elements = parameter_bytes // dtype_bytes(parameter_dtype)
    if name in _STATE_COPIES:
        return _STATE_COPIES[name] * elements * dtype_bytes(state_dtype or parameter_dtype)
    if name in _QUANTIZED_BITS:
        return _quantized_state_bytes(elements, _QUANTIZED_BITS[name])
    if name in ("adafactor", "sm3"):
        return factored_state_elements(_known_shape(name, shape)) * dtype_bytes(state_dtype or "float32")
    raise UnpricedError(
        f"the state of optimizer {optimizer_name!r} is unknown",
        fix=f"use one of {sorted([*_STATE_COPIES, *_QUANTIZED_BITS, 'adafactor', 'sm3'])}",
    )


def factored_state_elements(shape: tuple[int, ...]) -> int:
    """Elements of a factored second moment: rows plus columns of the last two dims; vectors keep all of theirs.

    Source: Shazeer and Stern, Adafactor, 2018, section 3.
    """
    if len(shape) < 2:
        return math.prod(shape)
    return math.prod(shape[:-2]) * (shape[-2] + shape[-1])


def _quantized_state_bytes(elements: int, bits: int) -> int:
    if elements < _QUANTIZED_MIN_ELEMENTS:
        return 2 * 4 * elements
    scales = -(-elements // _QUANTIZED_BLOCK)
    return 2 * (-(-elements * bits // 8) + 4 * scales)


def _known_shape(name: str, shape: tuple[int, ...] | None) -> tuple[int, ...]:
    if shape is None:
        raise UnpricedError(f"the state of {name} depends on the parameter's shape", fix="pass shape=")
    return shape


def _end(item: Buffer, ops: int) -> int:
    return ops if item.freed_at is None else min(item.freed_at, ops)
