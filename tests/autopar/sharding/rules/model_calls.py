"""Calls of ops in shapes that models have, with dims that divide by two and three and dims that do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.sharding.op_call import op_name

aten = torch.ops.aten
F64 = torch.float64


@dataclass(frozen=True)
class ModelCall:
    """One call; its arguments are made anew for each test."""

    target: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    kwargs: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def name_of_op(self) -> str:
        return op_name(self.target)

    @property
    def name(self) -> str:
        return f"{self.name_of_op} {self.note}".strip()


def real(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=F64)


def below(limit: int, *size: int) -> torch.Tensor:
    return torch.randint(0, limit, size)


def scores_and_targets(*size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of 12 classes in dim 1, targets of which some are 5, the ignored one."""
    scores = torch.log_softmax(real(24, 12, *size), 1)
    targets = below(12, 24, *size)
    targets[:2] = 5
    return scores, targets


def nll(dims: tuple[int, ...], reduction: int, weight: torch.Tensor | None) -> tuple[Any, ...]:
    scores, targets = scores_and_targets(*dims)
    return scores, targets, weight, reduction, 5


def nll_backward(dims: tuple[int, ...], reduction: int, weight: torch.Tensor | None) -> tuple[Any, ...]:
    forward = aten.nll_loss2d_forward.default if dims else aten.nll_loss_forward.default
    args = nll(dims, reduction, weight)
    loss, total = forward(*args)
    return (torch.randn_like(loss), *args, total)


def layer_norm_backward(mask: list[bool]) -> tuple[Any, ...]:
    source, weight, bias = real(6, 4, 12), real(12), real(12)
    _, mean, rstd = aten.native_layer_norm.default(source, [12], weight, bias, 1e-5)
    return torch.randn_like(source), source, [12], mean, rstd, weight, bias, mask


def group_norm_backward() -> tuple[Any, ...]:
    source, weight = real(6, 12, 4), real(12)
    _, mean, rstd = aten.native_group_norm.default(source, weight, real(12), 6, 12, 4, 6, 1e-5)
    return torch.randn_like(source), source, mean, rstd, weight, 6, 12, 4, 6, [True, True, True]


def cdist_backward() -> tuple[Any, ...]:
    left, right = real(6, 12, 4), real(6, 8, 4)
    return real(6, 12, 8), left, right, 2.0, aten._cdist_forward.default(left, right, 2.0, None)


def batch_norm(mode: str) -> tuple[Any, ...]:
    statistics = real(12), real(12).abs() + 0.5
    return real(6, 12, 4), real(12), real(12), *statistics, mode == "train", 0.1, 1e-5


def batch_norm_backward(mode: str) -> tuple[Any, ...]:
    source, weight, _, mean, variance, training, _, eps = batch_norm(mode)
    saved = source.mean((0, 2)), (source.var((0, 2), correction=0) + eps).rsqrt()
    return torch.randn_like(source), source, weight, mean, variance, *saved, training, eps, [True] * 3


def max_pool_backward() -> tuple[Any, ...]:
    source = real(6, 12, 8, 8)
    pooled, indices = aten.max_pool2d_with_indices.default(source, [2, 2], [2, 2])
    return torch.randn_like(pooled), source, [2, 2], [2, 2], [0, 0], [1, 1], False, indices


def half_masked() -> torch.Tensor:
    """Rows of attention scores of which the first two are masked whole."""
    return torch.where(torch.arange(6)[:, None] < 2, torch.tensor(-torch.inf, dtype=F64), real(6, 50))


BY_CHANNEL = (False, [0, 0], 12, [True, True, False])
WINDOW = ([1, 1], [1, 1], [1, 1])
MODEL_CALLS: tuple[ModelCall, ...] = (
    ModelCall(aten.mm.default, lambda: (real(6, 12), real(12, 24))),
    ModelCall(aten.addmm.default, lambda: (real(24), real(6, 12), real(12, 24))),
    ModelCall(aten.addmm.default, lambda: (real(24), real(7, 13), real(13, 24)), note="of sizes that do not divide"),
    ModelCall(aten.bmm.default, lambda: (real(6, 5, 12), real(6, 12, 4))),
    ModelCall(aten.baddbmm.default, lambda: (real(5, 4), real(6, 5, 12), real(6, 12, 4))),
    ModelCall(aten._trilinear.default, lambda: (real(6, 4), real(8, 4, 12), real(6, 12), [1, 3], [0], [1, 2], [2, 3])),
    ModelCall(aten._cdist_backward.default, cdist_backward),
    ModelCall(aten.add.Tensor, lambda: (real(6, 4, 12), real(4, 1))),
    ModelCall(aten.mul.Tensor, lambda: (real(6, 4), real(6, 4))),
    ModelCall(aten.mul.Tensor, lambda: (real(6, 4), 2.0), note="by a number"),
    ModelCall(aten.where.self, lambda: (real(6, 4) > 0, real(6, 4), real(6, 1))),
    ModelCall(aten.copy.default, lambda: (real(6, 4), real(4))),
    ModelCall(aten.fill.Tensor, lambda: (real(6, 4), real())),
    ModelCall(aten.lift_fresh_copy.default, lambda: (real(6, 4),)),
    ModelCall(aten.detach_copy.default, lambda: (real(6, 4),)),
    ModelCall(aten.isin.Tensor_Scalar, lambda: (below(4, 6, 4), 2)),
    ModelCall(aten._neg_view.default, lambda: (real(6, 4),)),
    ModelCall(aten.view.default, lambda: (real(6, 4, 12), [24, 12]), note="merging tokens"),
    ModelCall(aten.view.default, lambda: (real(24, 12), [6, 4, 12]), note="splitting tokens"),
    ModelCall(aten.view.default, lambda: (real(6, 4, 12), [6, 4, 6, 2]), note="splitting heads"),
    ModelCall(aten.view.default, lambda: (real(6, 4, 12), [-1, 48]), note="of an open size"),
    ModelCall(aten.view.dtype, lambda: (real(6, 4), torch.int64)),
    ModelCall(aten._reshape_alias.default, lambda: (real(6, 4, 12), [24, 12], [12, 1])),
    ModelCall(aten._reshape_copy.default, lambda: (real(6, 4, 12), [24, 12])),
    ModelCall(aten.expand.default, lambda: (real(6, 1, 4), [2, -1, 6, 4])),
    ModelCall(aten.squeeze.default, lambda: (real(2, 1, 4, 3),)),
    ModelCall(aten.squeeze.dim, lambda: (real(2, 1, 4, 3), 0), note="of a dim longer than one"),
    ModelCall(aten.select_copy.int, lambda: (real(6, 4, 12), 1, 0)),
    ModelCall(aten.slice.Tensor, lambda: (real(6, 12), 1, 0, -1)),
    ModelCall(aten.slice.Tensor, lambda: (real(6, 12), 1, 0, 99), note="of the whole"),
    ModelCall(aten.slice_backward.default, lambda: (real(6, 11), [6, 12], 1, 0, -1, 1)),
    ModelCall(aten.slice_scatter.default, lambda: (real(6, 12), real(6, 11), 1, 0, -1, 1)),
    ModelCall(aten.select_backward.default, lambda: (real(6, 12), [6, 4, 12], 1, 0)),
    ModelCall(aten.split.Tensor, lambda: (real(6, 12), 4, 1)),
    ModelCall(aten.unsafe_split_with_sizes.default, lambda: (real(6, 12), [4, 8], 1)),
    ModelCall(aten.cat.default, lambda: ([real(6, 12), real(6, 4)], 1)),
    ModelCall(aten.embedding.default, lambda: (real(50, 12), below(50, 6, 4))),
    ModelCall(aten.embedding_dense_backward.default, lambda: (real(6, 4, 12), below(50, 6, 4), 50, 3, False)),
    ModelCall(
        aten.embedding_dense_backward.default,
        lambda: (real(6, 4, 12), below(50, 6, 4), 50, -1, True),
        note="by frequency",
    ),
    ModelCall(aten._embedding_bag.default, lambda: (real(50, 12), below(50, 24), torch.arange(0, 24, 4))),
    ModelCall(aten._embedding_bag_forward_only.default, lambda: (real(50, 12), below(50, 24), torch.arange(0, 24, 4))),
    ModelCall(aten._log_softmax.default, lambda: (real(6, 4, 50), 2, False)),
    ModelCall(aten._log_softmax_backward_data.default, lambda: (real(6, 50), real(6, 50), 1, F64)),
    ModelCall(aten._softmax.default, lambda: (real(6, 50), -1, False)),
    ModelCall(aten._softmax_backward_data.default, lambda: (real(6, 50), real(6, 50), -1, F64)),
    ModelCall(aten._safe_softmax.default, lambda: (half_masked(), -1)),
    *(
        ModelCall(op, lambda dims=dims, kind=kind, weight=weight, make=make: make(dims, kind, weight), note=note)
        for op, dims, make in (
            (aten.nll_loss_forward.default, (), nll),
            (aten.nll_loss_backward.default, (), nll_backward),
            (aten.nll_loss2d_forward.default, (4, 2), nll),
            (aten.nll_loss2d_backward.default, (4, 2), nll_backward),
        )
        for kind, reduction in enumerate(("unreduced", "averaged", "summed"))
        for weight, note in ((None, reduction), (torch.arange(1.0, 13, dtype=F64), f"{reduction}, weighted"))
    ),
    ModelCall(aten.native_layer_norm.default, lambda: (real(6, 4, 12), [12], real(12), real(12), 1e-5)),
    ModelCall(aten.native_layer_norm.default, lambda: (real(6, 4, 9), [4, 9], None, None, 1e-5), note="of two dims"),
    ModelCall(aten.native_layer_norm_backward.default, lambda: layer_norm_backward([True, True, True])),
    ModelCall(
        aten.native_layer_norm_backward.default, lambda: layer_norm_backward([True, False, False]), note="in part"
    ),
    ModelCall(aten._fused_rms_norm.default, lambda: (real(6, 4, 12), [12], real(12), 1e-5)),
    ModelCall(aten.native_group_norm.default, lambda: (real(6, 12, 4), real(12), real(12), 6, 12, 4, 6, 1e-5)),
    ModelCall(aten.native_group_norm_backward.default, group_norm_backward),
    ModelCall(aten.native_batch_norm.default, lambda: batch_norm("eval"), note="in eval mode"),
    ModelCall(aten._native_batch_norm_legit_functional.default, lambda: batch_norm("train")),
    ModelCall(aten._native_batch_norm_legit_no_training.default, lambda: (*batch_norm("eval")[:5], 0.1, 1e-5)),
    ModelCall(aten.norm.Scalar, lambda: (real(6, 12), 3)),
    ModelCall(aten.norm.ScalarOpt_dim, lambda: (real(6, 12), None, [1], True)),
    ModelCall(aten.prod.default, lambda: (real(6, 12),)),
    ModelCall(aten.prod.dim_int, lambda: (real(6, 12), 1)),
    ModelCall(aten.mean.dim, lambda: (real(6, 4, 12), [0, 1])),
    ModelCall(aten.mean.default, lambda: (real(7, 5),)),
    ModelCall(aten.sum.dim_IntList, lambda: (real(6, 4, 12), [-1], True)),
    ModelCall(aten.cumsum.default, lambda: (below(2, 6, 12), 1)),
    ModelCall(aten.arange.default, lambda: (13,)),
    ModelCall(aten.arange.start, lambda: (3, 20)),
    ModelCall(aten.arange.start_step, lambda: (20, 3, -2)),
    ModelCall(aten.full.default, lambda: ([6, 12], 2.0), {"dtype": F64}),
    ModelCall(aten.new_zeros.default, lambda: (real(6), [4, 12])),
    ModelCall(aten.new_zeros.default, lambda: (real(6, 4), [6, 12]), note="as its input"),
    ModelCall(aten.gather.default, lambda: (real(6, 50), 1, below(50, 6, 4))),
    ModelCall(aten.index.Tensor, lambda: (real(50, 6), [below(50, 6, 4) - 20]), note="from the end"),
    ModelCall(aten.index.Tensor, lambda: (real(6, 12, 4), [None, below(12, 6, 1), below(4, 6)]), note="broadcast"),
    ModelCall(aten._unsafe_index.Tensor, lambda: (real(6, 12, 4), [None, below(12, 6), below(4, 6)])),
    ModelCall(
        aten._unsafe_index_put.default, lambda: (real(6, 12), [below(6, 4)], real(4, 12), True), note="accumulated"
    ),
    ModelCall(aten.index_put.default, lambda: (real(6, 12), [None, below(12, 4)], real(6, 4), True)),
    ModelCall(aten.scatter.reduce, lambda: (real(6, 12), 1, below(12, 6, 4), real(6, 4)), {"reduce": "add"}),
    ModelCall(aten.scatter.value_reduce, lambda: (real(6, 12), 1, below(12, 6, 4), 2.0), {"reduce": "multiply"}),
    ModelCall(
        aten.convolution.default, lambda: (real(6, 12, 8, 8), real(18, 12, 3, 3), real(18), *WINDOW, False, [0, 0], 1)
    ),
    ModelCall(
        aten.convolution.default,
        lambda: (real(6, 12, 8, 8), real(24, 2, 3, 3), real(24), *WINDOW, False, [0, 0], 6),
        note="in groups",
    ),
    ModelCall(
        aten.convolution.default,
        lambda: (real(6, 12, 8, 8), real(12, 6, 3, 3), real(6), *WINDOW, True, [0, 0], 1),
        note="transposed",
    ),
    ModelCall(
        aten.convolution_backward.default,
        lambda: (real(6, 18, 8, 8), real(6, 12, 8, 8), real(18, 12, 3, 3), [18], *WINDOW, False, [0, 0], 1, [True] * 3),
    ),
    ModelCall(
        aten.convolution_backward.default,
        lambda: (
            real(6, 12, 8, 8),
            real(6, 12, 8, 8),
            real(12, 1, 3, 3),
            None,
            *WINDOW,
            False,
            [0, 0],
            12,
            [True, True, False],
        ),
        note="by channel",
    ),
    ModelCall(aten.native_batch_norm_backward.default, lambda: batch_norm_backward("eval"), note="in eval mode"),
    ModelCall(aten.native_batch_norm_backward.default, lambda: batch_norm_backward("train")),
    ModelCall(aten._native_batch_norm_legit.default, lambda: batch_norm("eval")),
    ModelCall(aten.max_pool2d_with_indices_backward.default, max_pool_backward),
    ModelCall(aten._upsample_nearest_exact3d.default, lambda: (real(6, 4, 4, 4, 4), [8, 8, 8])),
    ModelCall(
        aten._upsample_nearest_exact3d_backward.default, lambda: (real(6, 4, 8, 8, 8), [8, 8, 8], [6, 4, 4, 4, 4])
    ),
    ModelCall(aten._upsample_bicubic2d_aa.default, lambda: (real(6, 4, 8, 8), [4, 4], False)),
    ModelCall(aten._upsample_bicubic2d_aa_backward.default, lambda: (real(6, 4, 4, 4), [4, 4], [6, 4, 8, 8], False)),
)
