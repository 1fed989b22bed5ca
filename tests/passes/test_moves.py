"""Moves, run on all ranks of a mesh in one process: shard, move, recombine."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Partial, Replicate, Shard

from autopar.fake_calls import FakeCalls
from autopar.passes.local_call import GraphBuilder, RankGeometry
from autopar.passes.moves import local_move
from autopar.runtime.lockstep import run_lockstep
from autopar.runtime.virtual_groups import every_coordinates, virtual_group_names
from autopar.sharding.layout import Layout, is_partial, local_chunk, parse_layout
from autopar.sharding.op_call import TensorSpec
from autopar.sharding.reshard import reshard_path

MESHES = [(2,), (3,), (1, 2), (2, 2), (2, 3), (2, 2, 2)]
COUNTED = {
    "all_reduce.default": "all_reduce",
    "all_gather_into_tensor.default": "all_gather",
    "reduce_scatter_tensor.default": "reduce_scatter",
    "all_to_all_single.default": "all_to_all",
}


def shard(full: Tensor, layout: Layout, mesh: tuple[int, ...]) -> list[Tensor]:
    """Every rank's shard; partial shards are random addends of the value (or all equal, for a maximum)."""
    return [_local(full, layout, mesh, coordinates) for coordinates in every_coordinates(mesh)]


def _local(full: Tensor, layout: Layout, mesh: tuple[int, ...], coordinates: tuple[int, ...]) -> Tensor:
    offsets, lengths = local_chunk(full.shape, layout, mesh, coordinates)
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        full = full.narrow(dim, offset, length)
    for placement, ranks, index in zip(layout, mesh, coordinates, strict=True):
        if placement == Partial():  # addends 1, 2, 4, ... and the rest on the last rank: exact in integers
            full = full - (2 ** (ranks - 1) - 1) if index == ranks - 1 else torch.full_like(full, 2**index)
    return full.clone()


def moved(
    full_shape: tuple[int, ...], dtype: torch.dtype, source: Layout, target: Layout, mesh: tuple[int, ...]
) -> list[fx.GraphModule]:
    """One graph per rank that holds one move."""
    graphs = []
    for coordinates in every_coordinates(mesh):
        geometry = RankGeometry(mesh, coordinates, virtual_group_names(coordinates, mesh), "cpu")
        build = GraphBuilder(fx.Graph(), FakeCalls(FakeTensorMode()), geometry)
        given_ = build.graph.placeholder("x")
        with build.fake_calls.mode:
            given_.meta["val"] = torch.empty(geometry.chunk(full_shape, source)[1], dtype=dtype)
        build.graph.output((local_move(build, given_, full_shape, source, target),))
        graphs.append(fx.GraphModule({}, build.graph))
    return graphs


def check_move(full: Tensor, source: Layout, target: Layout, mesh: tuple[int, ...]) -> list[fx.GraphModule]:
    graphs = moved(tuple(full.shape), full.dtype, source, target, mesh)
    for gm in graphs:
        gm.graph.lint()
    outputs = run_lockstep(graphs, [[local] for local in shard(full, source, mesh)])
    for (actual,), expected, gm in zip(outputs, shard(full, target, mesh), graphs, strict=True):
        if not any(map(is_partial, target)):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        fake = next(iter(reversed(gm.graph.nodes))).args[0][0].meta["val"]
        assert (actual.shape, actual.dtype) == (fake.shape, fake.dtype)
        assert strides_that_count(actual) == strides_that_count(fake)
    torch.testing.assert_close(recombine([actual for (actual,) in outputs], target, full, mesh), full, rtol=0, atol=0)
    return graphs


def recombine(shards: list[Tensor], layout: Layout, full: Tensor, mesh: tuple[int, ...]) -> Tensor:
    """The full tensor; of replicated axes, the first rank's copy."""
    total = torch.zeros_like(full)
    for coordinates, local in zip(every_coordinates(mesh), shards, strict=True):
        if any(placement == Replicate() and at for placement, at in zip(layout, coordinates, strict=True)):
            continue
        place = total
        for dim, (offset, length) in enumerate(zip(*local_chunk(full.shape, layout, mesh, coordinates), strict=True)):
            place = place.narrow(dim, offset, length)
        place += local
    return total


def strides_that_count(tensor: Tensor) -> list[int]:
    """Strides of the dims along which one can walk."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1] * (tensor.numel() > 0)


def sent_bytes(gm: fx.GraphModule) -> list[tuple[str, int]]:
    """(collective, bytes of the full tensor over its group) in the order of the graph."""
    found = []
    for node in gm.graph.nodes:
        kind = COUNTED.get(str(node.target).removeprefix("_c10d_functional."))
        if kind is not None:
            full = node.meta["val"] if kind == "all_gather" else node.args[0].meta["val"]
            found.append((kind, full.numel() * full.element_size()))
    return found


@st.composite
def moves(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Layout, Layout]:
    mesh = draw(st.sampled_from(MESHES))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    placements = [Replicate(), Partial(), *map(Shard, range(len(shape)))]
    source = tuple(draw(st.sampled_from(placements)) for _ in mesh)
    target = tuple(
        draw(st.sampled_from([it for it in placements if not is_partial(it) or it == source[axis]]))
        for axis in range(len(mesh))
    )
    return mesh, shape, source, target


@settings(max_examples=40)
@given(moves())
def test_a_move_keeps_the_value_and_sends_the_bytes_of_its_steps(
    case: tuple[tuple[int, ...], tuple[int, ...], Layout, Layout],
) -> None:
    mesh, shape, source, target = case
    full = torch.randint(-100, 100, shape, dtype=torch.int64).double()
    graphs = check_move(full, source, target, mesh)
    steps = reshard_path(TensorSpec(shape, full.dtype), source, target, mesh)
    priced = [(step.collective, step.bytes) for step in steps if step.collective is not None]
    assert sent_bytes(graphs[0]) == priced


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("ends", ["S0 R", "S1 R", "S0 S1", "S1 S0", "R S1"])
def test_every_dtype_moves(dtype: torch.dtype, ends: str) -> None:
    source, target = (parse_layout(text, 1) for text in ends.split())
    check_move(torch.randint(0, 2, (5, 7)).to(dtype), source, target, (3,))


@pytest.mark.parametrize("reduce_op", ["max", "min", "avg"])
def test_other_reductions_are_completed(reduce_op: str) -> None:
    full = torch.arange(12.0).view(3, 4)
    check_move(full, (Partial(reduce_op),), (Replicate(),), (4,))


def test_axes_of_one_rank_emit_nothing() -> None:
    (gm,) = moved((4, 4), torch.float32, parse_layout("S0,P", 2), parse_layout("R,S1", 2), (1, 1))
    assert [node.op for node in gm.graph.nodes] == ["placeholder", "output"]


def test_a_gather_along_dim_0_is_a_gather_and_a_wait() -> None:
    gm = moved((8, 4), torch.float32, parse_layout("S0", 1), parse_layout("R", 1), (2,))[0]
    assert [str(node.target) for node in gm.graph.nodes if node.op == "call_function"] == [
        "_c10d_functional.all_gather_into_tensor.default",
        "_c10d_functional.wait_tensor.default",
    ]
