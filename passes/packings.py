"""The table of forms in which a saved value may be held between the phases: what each holds, and what it emits.

A residency beside `keep` and `recompute` is a word with one or more forms; the first that fits a value is taken.
`offload` puts it on the host. `compress` is exact: bits of a bool, bits of a number that the backward only compares
with zero, indices in as few bytes as they need. `compress-bf16`, `-fp8` and `-int8` lose as much as their `error` says,
so they are for those who allow them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import fx

from autopar.ops import packing as _packing  # noqa: F401  (registers the ops)
from autopar.passes.local_call import GraphBuilder
from autopar.sharding.op_call import OpCall, TensorSpec

aten, ops = torch.ops.aten, torch.ops.autopar
Nodes = tuple[fx.Node, ...]
SMALL_PART = 8  # beside an output so many times larger, an output is a statistic: not to be made less precise
SCALE_BLOCK = 256  # elements with one scale of four bytes: see `autopar.ops.packing`


@dataclass(frozen=True, slots=True)
class Saved:
    """An output of an op of the forward that the backward reads, through views or not.

    `readers`: the op and which of its tensor inputs the value is; None for a read by what is no op.
    """

    call: OpCall
    output: int
    readers: tuple[tuple[OpCall, int] | None, ...]

    @property
    def spec(self) -> TensorSpec:
        spec = self.call.outputs[self.output]
        assert spec is not None
        return spec


@dataclass(frozen=True)
class Form:
    """A way to hold a value. `bytes_`: held on the device, of so many elements of a dtype.

    `pack` emits what makes the packed values, `unpack` what makes a value like the original again. `error`: the largest
    difference, relative to the largest magnitude. `is_whole`: what is unpacked stands for the value, whoever reads it.
    """

    name: str
    residency: str
    fits: Callable[[Saved], bool]
    bytes_: Callable[[int, torch.dtype], int]
    pack: Callable[[GraphBuilder, fx.Node], Nodes]
    unpack: Callable[[GraphBuilder, Nodes, torch.Tensor], fx.Node]
    error: float = 0.0
    is_whole: bool = True
    on_host: bool = False  # then pack and unpack start copies that are to be waited for


SIGN_READERS: MappingProxyType[str, Callable[[OpCall, int], bool]] = MappingProxyType(
    {
        "aten.threshold_backward.default": lambda call, place: place == 1 and call.argument(2, "threshold") == 0,
        "aten.max_pool2d_with_indices_backward.default": lambda _, place: place == 1,
        "aten.max_pool3d_with_indices_backward.default": lambda _, place: place == 1,
    }
)
"""Ops that read of an input only whether it is above zero, or only its shape, as max-pools do of what they pooled."""
INDEX_MAKERS = MappingProxyType(
    {
        "aten.max_pool2d_with_indices.default": 2,
        "aten.max_pool3d_with_indices.default": 3,
        "aten.adaptive_max_pool2d.default": 2,
        "aten.adaptive_max_pool3d.default": 3,
        "aten.max.dim": 1,
        "aten.min.dim": 1,
        "aten.topk.default": 1,
        "aten.sort.default": 1,
    }
)
"""Ops whose second output counts elements of one dim of their input, or of so many last dims of it together."""


def _is_bool(saved: Saved) -> bool:
    return saved.spec.dtype == torch.bool


def _is_read_for_sign(saved: Saved) -> bool:
    if not saved.spec.dtype.is_floating_point or not saved.readers:
        return False
    return all(_reads_sign(*reader) for reader in saved.readers if reader is not None) and None not in saved.readers


def _reads_sign(call: OpCall, place: int) -> bool:
    return call.name in SIGN_READERS and SIGN_READERS[call.name](call, place)


def _has_indices_below(limit: int) -> Callable[[Saved], bool]:
    def fits(saved: Saved) -> bool:
        dims = INDEX_MAKERS.get(saved.call.name)
        if dims is None or saved.output != 1 or saved.spec.dtype != torch.int64:
            return False
        shape = saved.call.inputs[0].shape
        return (max(shape, default=1) if dims == 1 else math.prod(shape[-dims:])) <= limit

    return fits


def _is_wider_than(dtype: torch.dtype) -> Callable[[Saved], bool]:
    def fits(saved: Saved) -> bool:
        most = max(spec.nbytes for spec in saved.call.outputs if spec is not None)
        is_small = saved.spec.nbytes * SMALL_PART <= most
        return saved.spec.dtype.is_floating_point and saved.spec.dtype.itemsize > dtype.itemsize and not is_small

    return fits


def _cast_to(dtype: torch.dtype) -> Callable[[GraphBuilder, fx.Node], Nodes]:
    return lambda build, value: (build.op(aten._to_copy.default, value, dtype=dtype),)


def _cast_back(build: GraphBuilder, packed: Nodes, like: torch.Tensor) -> fx.Node:
    return build.op(aten._to_copy.default, packed[0], dtype=like.dtype)


def _unpack_bits(build: GraphBuilder, packed: Nodes, like: torch.Tensor) -> fx.Node:
    return build.op(ops.unpack_bits.default, packed[0], list(like.shape), list(like.stride()), like.dtype)


def _quantize_to(dtype: torch.dtype) -> Callable[[GraphBuilder, fx.Node], Nodes]:
    def pack(build: GraphBuilder, value: fx.Node) -> Nodes:
        both = build.op(ops.quantize.default, value, dtype)
        return tuple(build.op(operator.getitem, both, index) for index in range(2))

    return pack


def _dequantize(build: GraphBuilder, packed: Nodes, like: torch.Tensor) -> fx.Node:
    return build.op(ops.dequantize.default, *packed, list(like.shape), list(like.stride()), like.dtype)


def _quantized_bytes(numel: int, _: torch.dtype) -> int:
    return numel + 4 * -(-numel // SCALE_BLOCK)


def _reload(build: GraphBuilder, packed: Nodes, like: torch.Tensor) -> fx.Node:
    return build.op(ops.reload.default, packed[0], like.device)


def _bits(name: str, fits: Callable[[Saved], bool], *, is_whole: bool) -> Form:
    return Form(
        name, "compress", fits, lambda numel, _: -(-numel // 8),
        lambda build, value: (build.op(ops.pack_bits.default, value),), _unpack_bits, is_whole=is_whole,
    )  # fmt: skip


def _indices(dtype: torch.dtype) -> Form:
    limit, name = torch.iinfo(dtype).max + 1, str(dtype).removeprefix("torch.")
    return Form(
        name, "compress", _has_indices_below(limit), lambda numel, _: numel * dtype.itemsize, _cast_to(dtype),
        _cast_back,
    )  # fmt: skip


def _quantized(word: str, dtype: torch.dtype, error: float) -> Form:
    name = f"compress-{word}"
    return Form(name, name, _is_wider_than(dtype), _quantized_bytes, _quantize_to(dtype), _dequantize, error)


FORMS: tuple[Form, ...] = (
    _bits("bits", _is_bool, is_whole=True),
    _bits("signs", _is_read_for_sign, is_whole=False),
    *(_indices(dtype) for dtype in (torch.uint8, torch.int16, torch.int32)),
    Form(
        "offload", "offload", lambda _: True, lambda *_: 0,
        lambda build, value: (build.op(ops.offload.default, value),), _reload, on_host=True,
    ),
    Form(
        "compress-bf16", "compress-bf16", _is_wider_than(torch.bfloat16), lambda numel, _: 2 * numel,
        _cast_to(torch.bfloat16), _cast_back, error=2.0**-8,
    ),
    _quantized("fp8", torch.float8_e4m3fn, error=2.0**-4),
    _quantized("int8", torch.int8, error=1 / 127),
)  # fmt: skip
FORM_NAMED = MappingProxyType({form.name: form for form in FORMS})
EXACT = ("offload", "compress")
LOSSY = MappingProxyType({form.residency.removeprefix("compress-"): form.residency for form in FORMS if form.error})
PACKED = (*EXACT, *LOSSY.values())
"""The residencies that pack: words of plans and constraints."""


def error_of(residencies: Iterable[str]) -> float:
    """The largest error of the forms of some residencies, in relation to the largest magnitude."""
    errors = {form.residency: form.error for form in FORMS}
    return max((errors.get(word, 0.0) for word in residencies), default=0.0)


def form_for(residency: str, saved: Saved) -> Form | None:
    """The first form of a residency that fits a value; those that lose precision leave to exact ones what they can."""
    words = ("compress", residency) if residency in LOSSY.values() else (residency,)
    return next((form for form in FORMS if form.residency in words and form.fits(saved)), None)
