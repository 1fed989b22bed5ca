"""Moves on real process groups: four gloo ranks on this machine give what lockstep gives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from autopar.fake_calls import FakeCalls
from autopar.passes.local_call import GraphBuilder
from autopar.passes.moves import local_move
from autopar.runtime.step import geometry_of
from autopar.sharding.execution import distribute
from autopar.sharding.layout import parse_layout
from tests.gloo import run_on_ranks

MOVES = ("S0,S1 R,R", "P,P S0,S1", "S1,S1 S0,S0", "P,S0 R,R")
DTYPES = (torch.float32, torch.int64, torch.bool, torch.int16)


def moved_on_gloo() -> list[tuple[str, torch.dtype, list[Any]]]:
    """The shard of this rank after each move."""
    mesh = init_device_mesh("cpu", (2, 2))
    geometry = geometry_of(mesh)
    results = []
    for text in MOVES:
        source, target = (parse_layout(layout, 2) for layout in text.split())
        for dtype in DTYPES if "P" not in text else DTYPES[:2]:
            torch.manual_seed(0)
            full = torch.randint(0, 2 if dtype == torch.bool else 50, (7, 5)).to(dtype)
            local = distribute(full, source, (2, 2))[dist.get_rank()]
            build = GraphBuilder(fx.Graph(), FakeCalls(FakeTensorMode()), geometry)
            given = build.graph.placeholder("x")
            with build.fake_calls.mode:
                given.meta["val"] = torch.empty(local.shape, dtype=dtype)
            build.graph.output(local_move(build, given, tuple(full.shape), source, target))
            results.append((text, dtype, fx.GraphModule({}, build.graph)(local).tolist()))
    return results


def test_four_gloo_ranks_hold_what_each_move_promises() -> None:
    ranks = run_on_ranks(moved_on_gloo, 4)
    for rank, results in enumerate(ranks):
        for text, dtype, actual in results:
            torch.manual_seed(0)
            full = torch.randint(0, 2 if dtype == torch.bool else 50, (7, 5)).to(dtype)
            expected = distribute(full, parse_layout(text.split()[1], 2), (2, 2))[rank]
            tolerance = 1e-4 if dtype == torch.float32 else 0  # random addends
            torch.testing.assert_close(torch.tensor(actual, dtype=dtype), expected, rtol=0, atol=tolerance)
