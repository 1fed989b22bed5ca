"""A graph that notes the time after every node, and the notes of all ranks."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn

from autopar.passes.boxed import boxed
from autopar.passes.copy_graph import copy_graph

Times = npt.NDArray[np.float64]
CLOCK = "clock"


class Clock(nn.Module):
    """Notes the wall time and this thread's processor time whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[float, float]] = []

    def forward(self) -> None:
        self.noted.append((time.perf_counter(), time.thread_time()))


def with_ticks(gm: fx.GraphModule, clock: Clock) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """(a copy of `gm` that calls the clock at its start and after every node that runs, the names of those nodes)."""
    copy = copy_graph(gm)
    copy.add_module(CLOCK, clock)
    runs = [node for node in copy.graph.nodes if node.op not in ("placeholder", "output")]
    names = tuple(node.name for node in runs)
    with copy.graph.inserting_before(runs[0]):
        copy.graph.call_module(CLOCK)
    for node in runs:
        with copy.graph.inserting_after(node):
            copy.graph.call_module(CLOCK)
    return boxed(copy, copy.graph), names


def gathered(own: npt.ArrayLike, ranks: int) -> Times:
    """What every rank has, by step: [steps, ranks, ...]."""
    mine = torch.from_numpy(np.array(own, dtype=np.float64))
    parts = [torch.empty_like(mine) for _ in range(ranks)]
    torch.distributed.all_gather(parts, mine)
    found: Times = torch.stack(parts, 1).numpy()
    return found
