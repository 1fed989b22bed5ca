"""The ops of one kernel that calibration times one by one, with arguments of a given number of rows.

An op is named without its overload, as "aten.gelu"; `kernel_class` in the planner gives a call the same name. Choice of
the ops: what networks of PyTorch's own layers emit, forward and backward. An op of another library is timed only where
that library has been imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

WIDTH = 256  # elements of a row
CHANNELS = 16
ROWS = (1, 128, 2048)
_SIDES = {1: (1, 4), 128: (2, 32), 2048: (8, 64)}  # of images with as many elements: batch, side
CONTIGUOUS = {"memory_format": torch.contiguous_format}
Arguments = tuple[Any, ...]
"""Of a call; a dict at the end holds keyword arguments."""


@dataclass(frozen=True, slots=True)
class BoundKernel:
    """An op with arguments, and the bytes of all tensors that it reads and writes."""

    call: Callable[[], Any]
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class Shapes:
    """Tensors of `rows` rows on a device."""

    rows: int
    device: torch.device

    def matrix(self, width: int = WIDTH) -> Tensor:
        return torch.rand(self.rows, width, device=self.device) + 0.1

    def row(self) -> Tensor:
        return torch.rand(WIDTH, device=self.device)

    def column(self, width: int = 1) -> Tensor:
        return torch.rand(self.rows, width, device=self.device)

    def mask(self) -> Tensor:
        return self.matrix() > 0.6

    def indices(self, bound: int, *shape: int) -> Tensor:
        return torch.randint(bound, shape or (self.rows,), device=self.device)

    def image(self, scale: int = 1) -> Tensor:
        batch, side = _SIDES[self.rows]
        return torch.rand(batch, CHANNELS, side // scale, side // scale, device=self.device)

    def channels(self) -> Tensor:
        return torch.rand(CHANNELS, device=self.device)

    @property
    def batch(self) -> int:
        return _SIDES[self.rows][0]

    @property
    def area(self) -> int:
        """Elements of one channel of one image."""
        return _SIDES[self.rows][1] ** 2


Make = Callable[[Shapes], Arguments]


def _one(s: Shapes) -> Arguments:
    return (s.matrix(),)


def _two(s: Shapes) -> Arguments:
    return s.matrix(), s.matrix()


def _pooled(s: Shapes) -> tuple[Tensor, Tensor, Tensor]:
    image = s.image()
    pooled, indices = torch.ops.aten.max_pool2d_with_indices.default(image, [2, 2], [2, 2])
    return pooled, image, indices


_UNARY = (
    "abs", "clone", "cos", "elu", "erf", "exp", "gelu", "leaky_relu", "log", "neg", "ones_like", "reciprocal",
    "relu", "rsqrt", "sigmoid", "silu", "sin", "softplus", "sqrt", "tanh", "zeros_like",
)  # fmt: skip
_BINARY = ["add", "div", "gelu_backward", "maximum", "mul", "sigmoid_backward", "silu_backward", "sub", "tanh_backward"]
_OVERLOAD = {"add": "Tensor", "div": "Tensor", "mul": "Tensor", "sub": "Tensor"}

KERNELS: Mapping[str, tuple[str, Make]] = MappingProxyType(
    {
        **{f"aten.{name}": ("default", _one) for name in _UNARY},
        "aten.cumsum": ("default", lambda s: (s.matrix(), -1)),
        **{f"aten.{name}": (_OVERLOAD.get(name, "default"), _two) for name in _BINARY},
        # copies, conversions, choices
        "aten.copy": ("default", _two),
        "aten._to_copy": ("default", lambda s: (s.indices(9, s.rows, WIDTH),)),
        "aten.clone of a transpose": ("default", lambda s: (s.matrix().view(-1, 4, 64).transpose(0, 1), CONTIGUOUS)),
        "aten.bernoulli": ("p", lambda s: (s.matrix(), 0.5)),
        "aten.cat": ("default", lambda s: ([s.matrix(), s.matrix()], -1)),
        "aten.pow": ("Tensor_Scalar", lambda s: (s.matrix(), 2)),
        "aten.where": ("self", lambda s: (s.mask(), s.matrix(), s.matrix())),
        "aten.masked_fill": ("Scalar", lambda s: (s.matrix(), s.mask(), 0.0)),
        "aten.eq": ("Scalar", lambda s: (s.indices(9, s.rows, WIDTH), 3)),
        "aten.lt": ("Scalar", lambda s: (s.matrix(), 0.5)),
        "aten.logical_and": ("default", lambda s: (s.mask(), s.mask())),
        "aten.threshold_backward": ("default", lambda s: (s.matrix(), s.matrix(), 0)),
        "aten.leaky_relu_backward": ("default", lambda s: (s.matrix(), s.matrix(), 0.01, False)),
        "aten.constant_pad_nd": ("default", lambda s: (s.matrix(), [0, 1])),
        "aten.slice_backward": ("default", lambda s: (s.matrix(128), [s.rows, WIDTH], 1, 0, 128, 1)),
        "aten.select_backward": ("default", lambda s: (s.matrix(), [s.rows, 4, WIDTH], 1, 0)),
        # reductions
        "aten.sum": ("dim_IntList", lambda s: (s.matrix(), [-1], True)),
        "aten.sum of rows": ("dim_IntList", lambda s: (s.matrix(), [0], True)),
        "aten.mean": ("dim", lambda s: (s.matrix(), [-1], True)),
        "aten.var_mean": ("correction", lambda s: (s.matrix(), [-1])),
        "aten.amax": ("default", lambda s: (s.matrix(), [-1], True)),
        "aten.max": ("dim", lambda s: (s.matrix(), -1)),
        "aten.topk": ("default", lambda s: (s.matrix(8), 2)),
        "aten.sort": ("default", _one),
        # softmax, losses
        "aten._softmax": ("default", lambda s: (s.matrix(), -1, False)),
        "aten._softmax_backward_data": ("default", lambda s: (s.matrix(), s.matrix(), -1, torch.float32)),
        "aten._log_softmax": ("default", lambda s: (s.matrix(), -1, False)),
        "aten._log_softmax_backward_data": ("default", lambda s: (s.matrix(), s.matrix(), -1, torch.float32)),
        "aten.nll_loss_forward": ("default", lambda s: (s.matrix(), s.indices(WIDTH), None, 1, -100)),
        "aten.nll_loss_backward": ("default", lambda s: (torch.ones((), device=s.device), s.matrix(), s.indices(WIDTH),
                                                         None, 1, -100, torch.tensor(1.0, device=s.device))),
        "aten.mse_loss": ("default", _two),
        "aten.mse_loss_backward": ("default", lambda s: (torch.ones((), device=s.device), *_two(s), 1)),
        "aten.binary_cross_entropy_with_logits": ("default", lambda s: (s.matrix(), s.matrix())),
        # norms
        "aten.native_layer_norm": ("default", lambda s: (s.matrix(), [WIDTH], s.row(), s.row(), 1e-5)),
        "aten.native_layer_norm_backward": ("default", lambda s: (s.matrix(), s.matrix(), [WIDTH], s.column(),
                                                                  s.column(), s.row(), s.row(), [True] * 3)),
        "aten.native_group_norm": ("default", lambda s: (s.image(), s.channels(), s.channels(), s.batch, CHANNELS,
                                                         s.area, 4, 1e-5)),
        "aten.native_group_norm_backward": ("default", lambda s: (
            s.image(), s.image(), torch.rand(s.batch, 4, device=s.device), torch.rand(s.batch, 4, device=s.device),
            s.channels(), s.batch, CHANNELS, s.area, 4, [True] * 3)),
        "autopar.batch_norm_square_sum": ("default", lambda s: (s.image(), s.channels())),
        "autopar.batch_norm_apply": ("default", lambda s: (s.image(), *(s.channels() for _ in range(4)))),
        "autopar.batch_norm_backward_sums": ("default", lambda s: (s.image(), s.image(), s.channels())),
        "autopar.batch_norm_backward_apply": ("default", lambda s: (
            s.image(), s.image(), *(s.channels() for _ in range(5)), s.batch * s.area)),
        # look-ups
        "aten.embedding": ("default", lambda s: (torch.rand(2048, WIDTH, device=s.device), s.indices(2048))),
        "aten.embedding_dense_backward": ("default", lambda s: (s.matrix(), s.indices(2048), 2048, -1, False)),
        "aten.index": ("Tensor", lambda s: (s.matrix(), [s.indices(s.rows)])),
        "aten.index_select": ("default", lambda s: (s.matrix(), 0, s.indices(s.rows))),
        "aten.index_put": ("default", lambda s: (s.matrix(), [s.indices(s.rows)], s.matrix(), True)),
        "aten.gather": ("default", lambda s: (s.matrix(), -1, s.indices(WIDTH, s.rows, 16))),
        "aten.scatter": ("src", lambda s: (s.matrix(), -1, s.indices(WIDTH, s.rows, 16), s.column(16))),
        "aten.scatter_add": ("default", lambda s: (s.matrix(), -1, s.indices(WIDTH, s.rows, 16), s.column(16))),
        # images
        "aten.max_pool2d_with_indices": ("default", lambda s: (s.image(), [2, 2], [2, 2])),
        "aten.max_pool2d_with_indices_backward": ("default", lambda s: (
            *_pooled(s)[:2], [2, 2], [2, 2], [0, 0], [1, 1], False, _pooled(s)[2])),
        "aten.avg_pool2d": ("default", lambda s: (s.image(), [2, 2], [2, 2])),
        "aten.avg_pool2d_backward": ("default", lambda s: (s.image(2), s.image(), [2, 2], [2, 2], [0, 0], False, True,
                                                           None)),
        "aten.upsample_nearest2d": ("vec", lambda s: (s.image(), None, [2.0, 2.0])),
        "aten.upsample_bilinear2d": ("vec", lambda s: (s.image(), None, False, [2.0, 2.0])),
    }
)  # fmt: skip


def bound_kernel(name: str, shapes: Shapes) -> BoundKernel | None:
    """An entry of `KERNELS` with its arguments; None where its library has not been imported."""
    op = op_of(name)
    if op is None:
        return None
    arguments = KERNELS[name][1](shapes)
    keywords = arguments[-1] if isinstance(arguments[-1], dict) else {}
    call = partial(op, *arguments[: len(arguments) - bool(keywords)], **keywords)
    return BoundKernel(call, tensor_bytes(arguments, call()))


def op_of(name: str) -> Callable[..., Any] | None:
    """The op of an entry of `KERNELS`, or None where its library has not been imported."""
    namespace, _, packet = name.partition(" ")[0].partition(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    return None if found is None else getattr(found, KERNELS[name][0])


def tensor_bytes(*values: Any) -> int:
    """Bytes of all tensors in nested arguments or results."""
    if len(values) != 1:
        return sum(map(tensor_bytes, values))
    value = values[0]
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(tensor_bytes, value)) if isinstance(value, (list, tuple)) else 0
