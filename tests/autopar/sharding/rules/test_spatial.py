"""Sharded space: every rule of ops that slide windows over it, and of norms over it, recombines to the whole."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.sharding.execution import call_in, trace_op
from autopar.sharding.layout import shard_dim
from autopar.sharding.registry import rules_of
from autopar.sharding.rules.norms import MOMENTS
from autopar.sharding.rules.spatial import HALO
from tests.autopar.sharding.rules.proving import wrong_strategies

aten = torch.ops.aten
Case = tuple[Any, tuple[Any, ...]]
LINES = ((2,), (3,))
MESHES = (*LINES, (2, 2))
ALL = [True, True, True]


def real(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64)


def check(case: Case, cut: Sequence[int], form: str = HALO, meshes: Sequence[tuple[int, ...]] = MESHES) -> None:
    """Every rule holds, and there is one in `form` for just the dims of `cut`."""
    op, args = case
    call = call_in(trace_op(op, args, {}))
    dims = {shard_dim(rule.outputs[0]) for rule in rules_of(call) if rule.form == form}
    assert dims == set(cut)
    wrong, count = wrong_strategies(op, args, {}, meshes, most=16)
    assert count > len(meshes)
    assert not wrong, "\n".join(wrong)


def convolutions(
    sizes: Sequence[int],
    kernel: Sequence[int],
    *,
    stride: Sequence[int] = (1, 1, 1),
    padding: Sequence[int] = (0, 0, 0),
    dilation: Sequence[int] = (1, 1, 1),
    groups: int = 1,
    output_padding: Sequence[int] | None = None,
) -> Iterator[Case]:
    """A convolution and its backward; transposed where an output padding is given."""
    count, is_transposed = len(sizes), output_padding is not None
    numbers = [list(item[:count]) for item in (stride, padding, dilation)]
    how = (*numbers, is_transposed, list((output_padding or (0, 0, 0))[:count]), groups)
    source, weight = real(2, 4, *sizes), real(4, 4 // groups, *kernel)
    out = aten.convolution.default(source, weight, real(4), *how)
    yield aten.convolution.default, (source, weight, real(4), *how)
    yield aten.convolution_backward.default, (torch.randn_like(out), source, weight, [4], *how, ALL)


CONVOLUTIONS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "of three": (((8, 6), (3, 3)), {"padding": (1, 1)}),
    "strided and dilated": (
        ((11, 8), (3, 2)),
        {"stride": (2, 1), "padding": (2, 0), "dilation": (2, 3), "groups": 2},
    ),
    "wider than a chunk": (((11,), (7,)), {"padding": (3,)}),
    "padded far outside": (((11,), (2,)), {"stride": (2,), "padding": (5,)}),
    "of three dims": (((9, 7, 6), (3, 3, 3)), {"stride": (1, 2, 1), "padding": (1, 1, 0)}),
    "by channel": (((12,), (3,)), {"padding": (1,), "groups": 4}),
    "transposed": (((6, 5), (4, 3)), {"stride": (2, 2), "padding": (1, 1), "output_padding": (0, 1)}),
    "transposed, with gaps": (
        ((9,), (2,)),
        {"stride": (3,), "padding": (1,), "dilation": (2,), "groups": 2, "output_padding": (2,)},
    ),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_may_be_cut_in_every_spatial_dim(name: str) -> None:
    positional, keywords = CONVOLUTIONS[name]
    spatial = len(positional[0])
    for case in convolutions(*positional, **keywords):
        check(case, range(2, 2 + spatial), meshes=MESHES if spatial == 2 else LINES)


def test_only_the_wanted_gradients_of_a_convolution_are_made() -> None:
    _, (op, args) = convolutions((8, 6), (3, 3), padding=(1, 1))
    for mask in ([True, False, False], [False, True, True]):
        check((op, (*args[:-1], mask)), (2, 3), meshes=((2,),))


def pools() -> Iterator[tuple[str, Case]]:
    source = real(2, 2, 11, 9)
    window: tuple[Any, ...] = ([3, 2], [2, 1], [1, 1])
    for ceil_mode in (False, True):
        out, indices = aten.max_pool2d_with_indices.default(source, *window, [2, 1], ceil_mode)
        how = (*window, [2, 1], ceil_mode)
        yield f"maximum, ceil {ceil_mode}", (aten.max_pool2d_with_indices.default, (source, *how))
        backward = (torch.randn_like(out), source, *how, indices)
        yield f"maximum backward, ceil {ceil_mode}", (aten.max_pool2d_with_indices_backward.default, backward)
        means = (*window, ceil_mode, ceil_mode, None)
        out = aten.avg_pool2d.default(source, *means)
        yield f"mean, ceil {ceil_mode}", (aten.avg_pool2d.default, (source, *means))
        backward = (torch.randn_like(out), source, *means)
        yield f"mean backward, ceil {ceil_mode}", (aten.avg_pool2d_backward.default, backward)


POOLS = dict(pools())


@pytest.mark.parametrize("name", POOLS)
def test_pools_may_be_cut_in_every_spatial_dim(name: str) -> None:
    check(POOLS[name], (2, 3))


def test_a_maximum_among_minus_infinities_is_the_one_that_the_whole_finds() -> None:
    source = torch.full((1, 1, 8, 4), -torch.inf, dtype=torch.float64)
    check((aten.max_pool2d_with_indices.default, (source, [3, 3], [2, 2], [1, 1])), (2, 3), meshes=((2,),))


def test_pools_of_three_dims_may_be_cut_in_each() -> None:
    source, how = real(1, 2, 8, 6, 5), ([2, 3, 2], [2, 1, 1], [1, 1, 0])
    out, indices = aten.max_pool3d_with_indices.default(source, *how)
    check((aten.max_pool3d_with_indices.default, (source, *how)), (2, 3, 4), meshes=((2,),))
    backward = (torch.randn_like(out), source, *how, [1, 1, 1], False, indices)
    check((aten.max_pool3d_with_indices_backward.default, backward), (2, 3, 4), meshes=((2,),))


def test_adaptive_pools_of_equal_windows_may_be_cut() -> None:
    source, sizes = real(2, 2, 12, 10), [6, 4]
    check((aten._adaptive_avg_pool2d.default, (source, sizes)), (2,))
    out, indices = aten.adaptive_max_pool2d.default(source, sizes)
    check((aten.adaptive_max_pool2d.default, (source, sizes)), (2,))
    check((aten.adaptive_max_pool2d_backward.default, (torch.randn_like(out), source, indices)), (2,))
    check((aten._adaptive_avg_pool2d_backward.default, (torch.randn_like(out), source)), (2,))


INTERPOLATIONS = {
    "nearest": (aten.upsample_nearest2d.default, aten.upsample_nearest2d_backward.default, ()),
    "exact": (aten._upsample_nearest_exact2d.default, aten._upsample_nearest_exact2d_backward.default, ()),
    "linear": (aten.upsample_bilinear2d.default, aten.upsample_bilinear2d_backward.default, (False,)),
    "cubic": (aten.upsample_bicubic2d.default, aten.upsample_bicubic2d_backward.default, (False,)),
}


@pytest.mark.parametrize("name", INTERPOLATIONS)
def test_interpolation_by_powers_of_two_may_be_cut(name: str) -> None:
    forward, backward, how = INTERPOLATIONS[name]
    for sizes in ([14, 24], [7, 3]):
        source = real(2, 2, 7, 6)
        meshes = MESHES if sizes[0] > 7 else LINES
        check((forward, (source, sizes, *how)), (2, 3), meshes=meshes)
        grad = torch.randn_like(forward(source, sizes, *how))
        check((backward, (grad, sizes, list(source.shape), *how)), (2, 3), meshes=meshes)


def test_interpolation_by_other_factors_stays_whole_where_it_scales() -> None:
    check((aten.upsample_nearest2d.default, (real(2, 2, 6, 6), [18, 12])), (3,))
    check((aten.upsample_bilinear2d.default, (real(2, 2, 6, 6), [12, 12], True)), ())
    check((aten.upsample_nearest2d.default, (real(2, 2, 6, 6), [12, 12], 2.1, 2.0)), (3,))


@pytest.mark.parametrize("name", ["reflection_pad", "replication_pad"])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_padding_may_be_cut(name: str, spatial: int) -> None:
    source, amounts = real(1, 2, *(9, 8, 4)[:spatial]), [3, 1, 2, 2, 1, 2][: 2 * spatial]
    forward = getattr(aten, f"{name}{spatial}d").default
    backward = getattr(aten, f"{name}{spatial}d_backward").default
    grad = torch.randn_like(forward(source, amounts))
    check((forward, (source, amounts)), range(2, 2 + spatial), meshes=LINES)
    check((backward, (grad, source, amounts)), range(2, 2 + spatial), meshes=LINES)


@pytest.mark.parametrize("amounts, number", [([1, 2, 3, 0], 0.0), ([-1, 2, 0, -2], 1.5), ([7, 0], 2.0)])
def test_padding_by_a_number_and_cropping_may_be_cut(amounts: list[int], number: float) -> None:
    check((aten.constant_pad_nd.default, (real(2, 9, 12), amounts, number)), (1, 2) if len(amounts) > 2 else (2,))


def test_shuffled_pixels_may_be_cut_in_rows_and_columns() -> None:
    for case in ((aten.pixel_shuffle.default, real(2, 8, 6, 6)), (aten.pixel_unshuffle.default, real(2, 2, 12, 12))):
        op, source = case
        dims = {rule.outputs[0] for rule in rules_of(call_in(trace_op(op, (source, 2), {})))}
        assert {torch.distributed.tensor.Shard(dim) for dim in (2, 3)} <= dims
        wrong, _ = wrong_strategies(op, (source, 2), {}, MESHES, most=16)
        assert not wrong


def group_norms() -> Iterator[tuple[str, Case]]:
    for name, shape, groups in (
        ("images", (2, 6, 6, 5), 3),
        ("lines", (2, 6, 9), 2),
        ("one group", (2, 4, 6, 6), 1),
    ):
        source, weight, bias = real(*shape), real(shape[1]), real(shape[1])
        counts = (*shape[:2], source[0, 0].numel(), groups)
        _, mean, rstd = aten.native_group_norm.default(source, weight, bias, *counts, 1e-5)
        yield name, (aten.native_group_norm.default, (source, weight, bias, *counts, 1e-5))
        yield f"{name}, plain", (aten.native_group_norm.default, (source, None, None, *counts, 1e-5))
        args = (torch.randn_like(source), source, mean, rstd, weight, *counts)
        yield f"{name} backward", (aten.native_group_norm_backward.default, (*args, ALL))
        some = (*args[:4], None, *counts, [True, False, False])
        yield f"{name} backward, plain", (aten.native_group_norm_backward.default, some)


GROUP_NORMS = dict(group_norms())


@pytest.mark.parametrize("name", GROUP_NORMS)
def test_group_norm_over_sharded_space_sums_over_all_ranks(name: str) -> None:
    op, args = GROUP_NORMS[name]
    check((op, args), range(2, args[0].dim()), form=MOMENTS)


def test_random_convolutions_may_be_cut() -> None:
    draw = random.Random(0)
    for _ in range(3):
        sizes = [draw.randint(9, 14) for _ in range(2)]
        three = lambda low, high: [draw.randint(low, high) for _ in range(2)]  # noqa: E731
        keywords = {"stride": three(1, 3), "padding": three(0, 3), "dilation": three(1, 2)}
        for case in convolutions(sizes, three(1, 4), groups=draw.choice([1, 2]), **keywords):
            check(case, (2, 3), meshes=((2,), (2, 2)))
