"""Times many small things fairly on a machine that does other work too.

Everything is timed in rounds: each call once a round, so that each finds the caches as the others left them, as in a
training step, and each is timed at moments that lie far apart. The least time of the rounds counts, since what else
runs only adds time. One thread of a CPU is timed by its processor time, which stands still while others run.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

Report = Callable[[str], None]  # told the name of each round before it runs
Calls = Sequence[Callable[[], object]]
LEAST_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class World:
    """Where this rank runs."""

    device: torch.device
    rank: int = 0
    ranks: int = 1
    ranks_per_node: int = 1


@contextmanager
def launched_world() -> Iterator[World]:
    """The world that torchrun launched, or one rank alone; leaves it as it was."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if not dist.is_torchelastic_launched():
        yield World(torch.device(kind))
        return
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        local = hosts[: dist.get_rank()].count(hosts[dist.get_rank()])
        if kind == "cuda":
            torch.cuda.set_device(local)
        here = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
        yield World(here, dist.get_rank(), len(hosts), max(hosts.count(host) for host in set(hosts)))
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Effort:
    """How many rounds, and after how many seconds no other one begins; `LEAST_ROUNDS` are always run."""

    rounds: int
    most_s: float


def least_seconds(calls: Calls, world: World, effort: Effort, report: Callable[[int], None]) -> list[float]:
    """The least time of each call on one rank, averaged over the ranks, which do not wait for each other."""
    clock = time.thread_time if world.device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    least = np.full(len(calls), np.inf)
    started = time.perf_counter()
    for number in range(effort.rounds):
        if number > LEAST_ROUNDS and time.perf_counter() - started > effort.most_s:
            break
        report(number)
        spent = np.array([_timed(call, world, clock) for call in calls])
        if number:  # the first one warms up
            least = np.minimum(least, spent)
    seconds: list[float] = (_over_ranks(world, least, dist.ReduceOp.SUM) / world.ranks).tolist()
    return seconds


def least_seconds_together(
    calls: Calls, world: World, effort: Effort, report: Callable[[int], None]
) -> list[tuple[float, float]]:
    """Of each call that all ranks make at once: (least seconds from when the last begins until the last is done,
    least seconds of all processors of a rank)."""
    spans: list[npt.NDArray[np.float64]] = []  # by call: begin, end, processor seconds
    started = time.perf_counter()
    for number in range(effort.rounds):
        late = np.array([float(number > LEAST_ROUNDS and time.perf_counter() - started > effort.most_s)])
        if _over_ranks(world, late, dist.ReduceOp.MAX)[0]:
            break
        report(number)
        spans.append(np.array([_span_together(call, world) for call in calls]))
    rounds = np.stack(spans[1:])  # the first one warms up
    worked = _over_ranks(world, rounds[..., 2], dist.ReduceOp.MAX).min(axis=0)
    if world.ranks_per_node < world.ranks:  # clocks of other machines show other times
        slowest = _over_ranks(world, rounds[..., 1] - rounds[..., 0], dist.ReduceOp.MAX)
    else:
        last = _over_ranks(world, rounds, dist.ReduceOp.MAX)
        slowest = last[..., 1] - last[..., 0]
    return list(zip(slowest.min(axis=0).tolist(), worked.tolist(), strict=True))


def _span_together(call: Callable[[], object], world: World) -> tuple[float, float, float]:
    dist.barrier()
    worked, start = time.process_time(), time.perf_counter()
    call()
    _wait(world)
    end = time.perf_counter()
    return start, end, time.process_time() - worked


def _timed(call: Callable[[], object], world: World, clock: Callable[[], float]) -> float:
    start = clock()
    kept = call()  # freed after the clock was read
    _wait(world)
    spent = clock() - start
    del kept
    return spent


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _over_ranks(world: World, values: npt.NDArray[np.float64], how: Any) -> npt.NDArray[np.float64]:
    if world.ranks == 1:
        return values
    cells = torch.from_numpy(values.copy()).to(world.device)
    dist.all_reduce(cells, how)
    return cells.cpu().numpy()
