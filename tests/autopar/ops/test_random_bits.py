"""Random ops: the same values under every cut, and values that pass for random."""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch
from torch import Tensor

import autopar.ops  # noqa: F401  (registers the ops)
from autopar.ops.random_bits import index_chunks

ops = torch.ops.autopar
SEED = torch.tensor(1234)
COUNT = 1 << 18
P_VALUE = 1e-4  # tests are on fixed seeds: they pass or fail for good


def uniform(shape: list[int], key: int = 1, seed: Tensor = SEED) -> Tensor:
    value: Tensor = ops.random_uniform(seed, shape, [0] * len(shape), shape, key, torch.float64)
    return value


def correlation(left: Tensor, right: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((left.double().flatten(), right.double().flatten())))[0, 1])


def test_uniform_values_fill_every_interval_alike() -> None:
    counts = uniform([COUNT]).histc(256, 0, 1)
    assert scipy.stats.chisquare(counts.numpy()).pvalue > P_VALUE


def test_uniform_values_follow_the_uniform_distribution() -> None:
    assert scipy.stats.kstest(uniform([COUNT]).numpy(), "uniform").pvalue > P_VALUE


def test_pairs_of_neighbours_fill_the_square_alike() -> None:
    pairs = (uniform([COUNT]).view(-1, 2) * 16).floor()
    counts = (pairs[:, 0] * 16 + pairs[:, 1]).long().bincount(minlength=256)
    assert scipy.stats.chisquare(counts.numpy()).pvalue > P_VALUE


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 17, 256, 1024, 4096])
def test_neighbours_at_any_lag_are_uncorrelated(lag: int) -> None:
    values = uniform([COUNT])
    assert abs(correlation(values[:-lag], values[lag:])) < 5 / math.sqrt(COUNT)


@pytest.mark.parametrize("bit", range(32))
def test_every_bit_is_set_half_of_the_time(bit: int) -> None:
    words = ops.random_integers(SEED, [COUNT], [0], [COUNT], 0, 1 << 32, 1)
    ones = ((words >> bit) & 1).double().mean()
    assert abs(float(ones) - 0.5) < 5 * 0.5 / math.sqrt(COUNT)


@pytest.mark.parametrize("other_key", [2, 3, 5, 1 << 20, (1 << 31) - 2])
def test_other_keys_give_independent_values(other_key: int) -> None:
    assert abs(correlation(uniform([COUNT]), uniform([COUNT], other_key))) < 5 / math.sqrt(COUNT)


@pytest.mark.parametrize("other_seed", [0, 1, 1233, 1235, -1, 1 << 40])
def test_other_seeds_give_independent_values(other_seed: int) -> None:
    other = uniform([COUNT], seed=torch.tensor(other_seed))
    assert abs(correlation(uniform([COUNT]), other)) < 5 / math.sqrt(COUNT)


@pytest.mark.parametrize("keep", [0.9, 0.5, 0.1, 0.001])
def test_a_mask_keeps_its_share(keep: float) -> None:
    mask = ops.random_mask(SEED, [COUNT], [0], [COUNT], keep, 1)
    assert abs(float(mask.double().mean()) - keep) < 5 * math.sqrt(keep * (1 - keep) / COUNT)


def test_a_mask_that_keeps_all_or_nothing_does_so_exactly() -> None:
    assert ops.random_mask(SEED, [9], [0], [9], 1.0, 1).all()
    assert not ops.random_mask(SEED, [9], [0], [9], 0.0, 1).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_normal_values_follow_the_normal_distribution(dtype: torch.dtype) -> None:
    values = ops.random_normal(SEED, [COUNT], [0], [COUNT], 1, dtype)
    assert scipy.stats.kstest(values.numpy(), "norm").pvalue > P_VALUE
    assert 4 < float(values.abs().max()) < 9


def test_integers_cover_their_range_alike() -> None:
    counts = ops.random_integers(SEED, [COUNT], [0], [COUNT], -3, 10, 1).add(3).bincount(minlength=13)
    assert len(counts) == 13 and scipy.stats.chisquare(counts.numpy()).pvalue > P_VALUE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_values_stay_below_one_in_every_dtype(dtype: torch.dtype) -> None:
    values = ops.random_uniform(SEED, [COUNT], [0], [COUNT], 1, dtype)
    assert values.dtype == dtype and float(values.min()) >= 0 and float(values.max()) < 1
    assert abs(float(values.double().mean()) - 0.5) < 0.01


def calls(shape: list[int], offset: list[int], full: list[int]) -> list[Tensor]:
    sizes = (SEED, shape, offset, full)
    return [
        ops.random_mask(*sizes, 0.7, 5),
        ops.random_uniform(*sizes, 5, torch.float32),
        ops.random_normal(*sizes, 5, torch.float32),
        ops.random_integers(*sizes, 0, 100, 5),
    ]


@pytest.mark.parametrize(
    ("offset", "shape"),
    [((0, 0, 0), (2, 5, 70)), ((1, 2, 3), (1, 3, 60)), ((2, 0, 0), (2, 5, 70)), ((0, 4, 69), (4, 1, 1))],
)
def test_a_slice_holds_exactly_the_values_of_the_full_tensor(offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    full = [4, 5, 70]
    where = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    for part, whole in zip(calls(list(shape), list(offset), full), calls(full, [0] * 3, full), strict=True):
        assert torch.equal(part, whole[where])


def test_a_slice_across_chunks_holds_the_values_of_the_full_tensor() -> None:
    full = [1500, 200]
    part = ops.random_mask(SEED, [1400, 150], [50, 25], full, 0.5, 1)
    assert torch.equal(part, ops.random_mask(SEED, full, [0, 0], full, 0.5, 1)[50:1450, 25:175])


def test_positions_beyond_32_bits_have_their_own_values() -> None:
    full = [3, 1 << 32]
    rows = [ops.random_uniform(SEED, [1, 1000], [row, 0], full, 1, torch.float64) for row in range(3)]
    assert abs(correlation(rows[0], rows[1])) < 0.2 and not torch.equal(rows[1], rows[2])


def test_an_empty_slice_and_a_scalar_are_fine() -> None:
    assert [value.numel() for value in calls([0, 5], [3, 0], [3, 5])] == [0] * 4
    assert [value.shape for value in calls([], [], [])] == [torch.Size([])] * 4


def test_positions_run_through_the_full_tensor_in_row_major_order() -> None:
    chunks = list(index_chunks([2, 3], [1, 1], [4, 5], torch.device("cpu")))
    assert [chunk[2].low.tolist() for chunk in chunks] == [[6, 7, 8, 11, 12, 13]]


@pytest.mark.parametrize("name", ["random_mask", "random_uniform", "random_normal", "random_integers"])
def test_the_op_is_registered_as_pytorch_demands(name: str) -> None:
    rest = {"random_mask": (0.5, 1), "random_integers": (0, 7, 1)}.get(name, (1, torch.float32))
    overload = getattr(ops, name).default
    torch.library.opcheck(
        overload, (SEED, [3, 4], [1, 0], [5, 4], *rest), test_utils=("test_schema", "test_faketensor")
    )
