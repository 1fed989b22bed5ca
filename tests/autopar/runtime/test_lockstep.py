"""Ranks in lockstep: every collective does what a process group does, and disagreement is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.errors import CollectiveMismatchError, UnknownGroupError
from autopar.passes.boxed import boxed
from autopar.runtime.lockstep import run_lockstep
from autopar.runtime.memory_tracker import LockstepMemory
from autopar.runtime.virtual_groups import (
    coordinates_of,
    every_coordinates,
    group_members,
    rank_of,
    virtual_group_name,
)

c10d = torch.ops._c10d_functional
WORLD = "autopar/axis0/0,1"


def graph_of(function: Callable[..., Any]) -> fx.GraphModule:
    return fx.symbolic_trace(function)


def run_on_two(function: Callable[[Tensor], Any], first: Tensor, second: Tensor) -> list[Any]:
    return run_lockstep([graph_of(function)] * 2, [[first], [second]])


def test_group_names_list_the_ranks_along_an_axis() -> None:
    assert virtual_group_name(1, (1, 2), (2, 4)) == "autopar/axis1/4,5,6,7"
    assert virtual_group_name(0, (1, 2), (2, 4)) == "autopar/axis0/2,6"
    assert group_members("autopar/axis0/2,6") == (2, 6)


def test_ranks_count_coordinates_in_row_major_order() -> None:
    shape = (2, 3, 2)
    assert [rank_of(here, shape) for here in every_coordinates(shape)] == list(range(12))
    assert [coordinates_of(rank, shape) for rank in range(12)] == list(every_coordinates(shape))


@pytest.mark.parametrize(("name", "expected"), [("sum", 4.0), ("avg", 2.0), ("max", 3.0), ("min", 1.0)])
def test_all_reduce_combines_the_ranks(name: str, expected: float) -> None:
    results = run_on_two(
        lambda x: c10d.wait_tensor.default(c10d.all_reduce.default(x, name, WORLD)),
        torch.ones(2),
        torch.full((2,), 3.0),
    )
    assert [result.tolist() for result in results] == [[expected] * 2] * 2


def test_gather_and_scatter_are_inverse() -> None:
    x, y = torch.arange(4.0), torch.arange(4.0, 8.0)

    def round_trip(x: Tensor) -> Tensor:
        whole = c10d.wait_tensor.default(c10d.all_gather_into_tensor.default(x, 2, WORLD))
        return c10d.wait_tensor.default(c10d.reduce_scatter_tensor.default(whole, "avg", 2, WORLD))

    results = run_on_two(round_trip, x, y)
    assert torch.equal(results[0], x) and torch.equal(results[1], y)


def test_all_to_all_sends_pieces_of_different_sizes() -> None:
    def exchange(received: list[int], sent: list[int]) -> fx.GraphModule:
        return graph_of(lambda x: c10d.wait_tensor.default(c10d.all_to_all_single.default(x, received, sent, WORLD)))

    graphs = [exchange([1, 2], [1, 3]), exchange([3, 1], [2, 1])]
    results = run_lockstep(graphs, [[torch.arange(4)], [torch.arange(10, 13)]])
    assert [result.tolist() for result in results] == [[0, 10, 11], [1, 2, 3, 12]]


def test_broadcast_sends_the_source_to_all() -> None:
    results = run_on_two(
        lambda x: c10d.wait_tensor.default(c10d.broadcast.default(x, 1, WORLD)), torch.zeros(2), torch.ones(2)
    )
    assert torch.equal(results[0], torch.ones(2))


def test_ranks_in_different_order_are_an_error_that_names_the_nodes() -> None:
    def reduces(x: Tensor) -> Tensor:
        return c10d.wait_tensor.default(c10d.all_reduce.default(x, "sum", WORLD))

    def gathers(x: Tensor) -> Tensor:
        return c10d.wait_tensor.default(c10d.all_gather_into_tensor.default(x, 2, WORLD))

    with pytest.raises(CollectiveMismatchError, match=r"all_reduce[\s\S]*all_gather"):
        run_lockstep([graph_of(reduces), graph_of(gathers)], [[torch.ones(2)], [torch.ones(2)]])
    with pytest.raises(CollectiveMismatchError, match="rank 0 at all_reduce_default"):
        run_lockstep([graph_of(reduces), graph_of(lambda x: x)], [[torch.ones(2)], [torch.ones(2)]])


def test_ranks_of_different_sizes_are_an_error() -> None:
    with pytest.raises(CollectiveMismatchError, match="sizes"):
        run_on_two(
            lambda x: c10d.wait_tensor.default(c10d.all_reduce.default(x, "sum", WORLD)), torch.ones(2), torch.ones(3)
        )


def test_real_groups_are_unknown_here() -> None:
    with pytest.raises(UnknownGroupError):
        run_lockstep([graph_of(lambda x: c10d.all_reduce.default(x, "sum", "0"))], [[torch.ones(1)]])


def test_values_die_at_their_last_use() -> None:
    def chain(x: Tensor) -> Tensor:
        for _ in range(5):
            x = x * 2
        return x

    gm = boxed(graph_of(chain), graph_of(chain).graph)
    memory = LockstepMemory(1)
    inputs = [torch.ones(1000)]
    run_lockstep([gm], [inputs], memory)
    assert inputs == []
    assert memory.peak_bytes == (2 * 4000,)
    assert memory.trackers[0].live_bytes == 0
