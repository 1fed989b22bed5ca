"""A graph that notes the time after every node, and what can be read of the notes of all ranks.

On a machine that does other work too, no step runs undisturbed, but every op does in one step or another. So each op
counts with the least processor time that it took in any step, and each collective with the least time from when the
last rank began to wait for it until the last rank had it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import fx, nn

from autopar.passes.boxed import boxed
from autopar.passes.collectives import is_wait
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


@dataclass(frozen=True, slots=True)
class Notes:
    """What this rank's clock noted in one phase: [steps, ticks, (wall, processor)], from the phase's start on.

    The ranks' programs may differ in their ops, not in their collectives.
    """

    nodes: tuple[fx.Node, ...]
    ticks: Times

    def seconds(self) -> Times:
        """Of each node: the least that it takes undisturbed. Called on every rank at once."""
        found: Times = np.diff(self.ticks[..., 1], axis=1).min(axis=0)
        waits = np.array([is_wait(node) for node in self.nodes])
        ends, begins = self.ticks[:, 1:, 0][:, waits], self.ticks[:, :-1, 0][:, waits]
        together = gathered(np.stack([begins, ends], -1), torch.distributed.get_world_size()).max(axis=1)
        found[waits] = (together[..., 1] - together[..., 0]).min(axis=0)
        return found


def gathered(own: npt.ArrayLike, ranks: int) -> Times:
    """What every rank has, by step: [steps, ranks, ...]."""
    mine = torch.from_numpy(np.array(own, dtype=np.float64))
    parts = [torch.empty_like(mine) for _ in range(ranks)]
    torch.distributed.all_gather(parts, mine)
    found: Times = torch.stack(parts, 1).numpy()
    return found
