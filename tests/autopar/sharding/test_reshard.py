"""Paths between layouts: valid, cheap, and priced alike one by one and in bulk."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from autopar.errors import UnreachableLayoutError
from autopar.sharding.layout import Layout, parse_layout
from autopar.sharding.op_call import TensorSpec
from autopar.sharding.reshard import moves_once, reshard_path, reshard_seconds_matrix, reshard_steps

SPEC = TensorSpec((12, 7, 5), torch.float32)


def price(collective: str, bytes_: int, axis: int) -> float:
    return 1e-6 * (1 + axis) + bytes_ * (1e-9 if collective == "slice" else 1e-8)


def layouts(rank: int, axes: int) -> list[Layout]:
    return list(itertools.product([Replicate(), Partial(), *map(Shard, range(rank))], repeat=axes))


def kinds(source: str, target: str, mesh: tuple[int, ...]) -> list[str | None]:
    path = reshard_path(SPEC, parse_layout(source, len(mesh)), parse_layout(target, len(mesh)), mesh)
    return [step.collective for step in path]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("S0", "R", ["all_gather"]),
        ("P", "R", ["all_reduce"]),
        ("P", "S1", ["reduce_scatter"]),
        ("P(max)", "R", ["all_reduce"]),
        ("R", "S2", [None]),
        ("S0", "S1", ["all_to_all"]),
        ("S0", "S0", []),
    ],
)
def test_one_axis_takes_one_step(source: str, target: str, expected: list[str | None]) -> None:
    assert kinds(source, target, (4,)) == expected


def test_nested_shards_open_from_the_innermost_axis() -> None:
    path = reshard_path(SPEC, parse_layout("S0,S0", 2), parse_layout("R,R", 2), (2, 3))
    assert [(step.axis, step.collective) for step in path] == [(1, "all_gather"), (0, "all_gather")]


def test_bytes_are_those_of_the_padded_tensor_over_the_group() -> None:
    (step,) = reshard_path(SPEC, parse_layout("S1", 1), parse_layout("R", 1), (4,))
    assert step.bytes == 12 * 8 * 5 * 4  # 7 rows over 4 ranks are 4 chunks of 2


def test_nothing_leads_to_partial() -> None:
    with pytest.raises(UnreachableLayoutError):
        reshard_path(SPEC, parse_layout("R", 1), parse_layout("P", 1), (2,))


def test_axes_of_one_rank_need_no_steps() -> None:
    assert kinds("P,S0", "S1,R", (1, 1)) == []


def test_the_matrix_holds_the_sums_of_the_steps() -> None:
    mesh, every = (2, 3), layouts(3, 2)
    matrix = reshard_seconds_matrix(SPEC, every, every, mesh, price)
    for (row, source), (column, target) in itertools.product(enumerate(every), repeat=2):
        if np.isfinite(matrix[row, column]):
            steps = reshard_steps(SPEC, source, target, mesh, price)
            assert matrix[row, column] == pytest.approx(sum(step.seconds for step in steps))
        else:
            assert any(want.is_partial() and want != have for have, want in zip(source, target, strict=True))


def test_a_matrix_mixes_reductions() -> None:
    ends = [(Partial("max"),), (Partial(),), (Replicate(),)]
    matrix = reshard_seconds_matrix(SPEC, ends, ends, (2,), price)
    assert np.isfinite(matrix).tolist() == [[True, False, True], [False, True, True], [False, False, True]]


def test_a_thousand_matrices_take_seconds() -> None:
    every, mesh = layouts(3, 3), (2, 4, 8)
    start = time.process_time()
    for size in range(10):
        spec = TensorSpec((64, 32 + size, 128), torch.float32)
        for _ in range(10):
            reshard_seconds_matrix(spec, every, every, mesh, price)
    assert time.process_time() - start < 5.0


def test_only_gathers_are_repeated_in_the_backward() -> None:
    mesh = (2, 2)
    assert not moves_once(parse_layout("S0,R", 2), parse_layout("R,R", 2), mesh)
    for source, target in (("P,R", "R,R"), ("R,R", "S0,R"), ("S0,R", "S1,R")):
        assert moves_once(parse_layout(source, 2), parse_layout(target, 2), mesh)
