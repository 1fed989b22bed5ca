"""Times many small things fairly on a machine that does other work too.

Everything is timed in rounds: each call once a round, so that each finds caches and memory as the others left them, as
in a training step, and each is timed at moments that lie far apart. The median of the rounds counts: what a call
usually takes, which is what the sum of a step's many calls comes to. One thread of a CPU is timed by its processor
time, which stands still while others run.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from autopar.torch_compat import register_gloo_in_order

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
    group: dist.ProcessGroup | None = None  # in which compiled models would communicate


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
        per_node = max(hosts.count(host) for host in set(hosts))
        group = dist.group.WORLD if kind == "cuda" else dist.new_group(backend=register_gloo_in_order())
        yield World(here, dist.get_rank(), len(hosts), per_node, group)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Effort:
    """How many rounds, and after how many seconds no other one begins; `LEAST_ROUNDS` are always run."""

    rounds: int
    most_s: float


def usual_seconds(calls: Calls, world: World, effort: Effort, report: Callable[[int], None]) -> list[float]:
    """The median time of each call on one rank, averaged over the ranks, which do not wait for each other.

    What the calls return is kept for a while, as the values of a forward are: memory is fresh as in a step.
    """
    clock = time.thread_time if world.device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    rounds: list[list[float]] = []
    started = time.perf_counter()
    for number in range(effort.rounds):
        if number > LEAST_ROUNDS and time.perf_counter() - started > effort.most_s:
            break
        report(number)
        kept = Kept()
        rounds.append([_timed(call, world, clock, kept) for call in calls])
    return _usual(rounds, world)


def usual_seconds_together(calls: Calls, world: World, effort: Effort, report: Callable[[int], None]) -> list[float]:
    """The median time of each call that all ranks make at once, averaged over the ranks."""
    rounds: list[list[float]] = []
    started = time.perf_counter()
    for number in range(effort.rounds):
        late = np.array([float(number > LEAST_ROUNDS and time.perf_counter() - started > effort.most_s)])
        if _over_ranks(world, late, dist.ReduceOp.MAX)[0]:
            break
        report(number)
        kept = Kept()
        rounds.append([_timed(call, world, time.perf_counter, kept) for call in calls])
    return _usual(rounds, world)


def _usual(rounds: list[list[float]], world: World) -> list[float]:
    """By call, the median of the rounds but the first, which warms up; the mean of the ranks."""
    own = np.median(np.array(rounds[1:] or rounds), axis=0)
    seconds: list[float] = (_over_ranks(world, own, dist.ReduceOp.SUM) / world.ranks).tolist()
    return seconds


def _timed(call: Callable[[], object], world: World, clock: Callable[[], float], kept: Kept) -> float:
    start = clock()
    result = call()
    _wait(world)
    spent = clock() - start
    kept.keep(result)
    return spent


class Kept:
    """Keeps what calls have returned, the oldest only as long as all of it takes no more than `most_bytes`."""

    def __init__(self, most_bytes: int = 2**28) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self._results: deque[tuple[object, int]] = deque()

    def keep(self, result: object) -> None:
        size = sum(item.nbytes for item in pytree.tree_leaves(result) if isinstance(item, torch.Tensor))
        self._results.append((result, size))
        self.bytes += size
        while self.bytes > self.most_bytes and len(self._results) > 1:
            self.bytes -= self._results.popleft()[1]


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _over_ranks(world: World, values: npt.NDArray[np.float64], how: Any) -> npt.NDArray[np.float64]:
    if world.ranks == 1:
        return values
    cells = torch.from_numpy(values.copy()).to(world.device)
    dist.all_reduce(cells, how)
    return cells.cpu().numpy()
