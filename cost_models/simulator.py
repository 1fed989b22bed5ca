"""Walks timed ops over streams: when each starts and ends, what communication is exposed, how long ranks idle.

Takes in ops in issue order with their durations, streams and dependencies; gives back times. Pure numbers: the planner
turns graphs and plans into ops. A stream is first in, first out; ops of one `group` start and end together, as the
ranks of a collective do; ops on one `link` share its rate evenly while they overlap; a rank that communicates computes
at the rate `overlap`.
"""

from __future__ import annotations

import heapq
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from autopar.errors import SimulationError

Kind: TypeAlias = Literal["compute", "communication"]
Seconds: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TimedOp:
    """One op of one rank: `seconds` alone on its stream, after the ops whose indices are in `after`."""

    name: str
    seconds: float
    kind: Kind = "compute"
    rank: int = 0
    stream: str = "compute"
    after: tuple[int, ...] = ()
    group: str = ""  # ops of one group, one per rank, start and end together
    link: str = ""  # ops on one link at the same time share it
    axis: int = -1  # the mesh axis of a collective: `on_every_rank` makes its groups
    detail: str = ""  # shown in traces: the op, its module, the user's line


@dataclass(frozen=True, slots=True)
class Simulation:
    """Start and end of every op, and what follows from them. Seconds, from the first op's issue."""

    ops: tuple[TimedOp, ...]
    starts_s: Seconds
    ends_s: Seconds
    step_s: float
    compute_s: Mapping[int, float]  # by rank: time its compute streams are busy
    communication_s: Mapping[int, float]  # by rank: time its communication streams are busy, hidden or not
    exposed_communication_s: Mapping[int, float]  # by rank: communicating while nothing computes
    idle_s: Mapping[int, float]  # by rank: neither

    def chrome_trace(self) -> dict[str, Any]:
        """The trace in Chrome's and Perfetto's JSON form; times in microseconds."""
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
            for rank in self.compute_s
        ]
        for op, start, end in zip(self.ops, self.starts_s.tolist(), self.ends_s.tolist(), strict=True):
            event = {"name": op.name, "cat": op.kind, "ph": "X", "pid": op.rank, "tid": op.stream,
                     "ts": start * 1e6, "dur": (end - start) * 1e6}  # fmt: skip
            events.append(event | ({"args": {"detail": op.detail}} if op.detail else {}))
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file that chrome://tracing and ui.perfetto.dev open."""
        Path(path).write_text(json.dumps(self.chrome_trace()), encoding="utf-8")

    def __str__(self) -> str:
        lines = [f"step {1e3 * self.step_s:.4g} ms"]
        for rank in self.compute_s:
            shares = {"compute": self.compute_s, "exposed communication": self.exposed_communication_s,
                      "idle": self.idle_s}  # fmt: skip
            text = ", ".join(f"{name} {1e3 * seconds[rank]:.4g} ms" for name, seconds in shares.items())
            lines.append(f"rank {rank}: {text}; communication in all {1e3 * self.communication_s[rank]:.4g} ms")
        return "\n".join(lines)


def simulate(ops: Sequence[TimedOp], *, rank_speeds: Sequence[float] = (), overlap: float = 1.0) -> Simulation:
    """Run the ops.

    `rank_speeds` slows compute of stragglers: 0.5 takes twice as long; missing ranks run at 1. `overlap`: the rate of
    compute on a rank while it communicates, 1 where communication takes nothing from it, 0 where nothing overlaps.
    """
    if not 0 <= overlap <= 1:
        raise SimulationError(f"overlap {overlap} is not in [0, 1]", fix="1: communication costs compute nothing")
    if any(speed <= 0 for speed in rank_speeds):
        raise SimulationError(f"a rank speed of {min(rank_speeds)} is not above 0", fix="0.5 takes twice as long")
    seconds = [op.seconds / _speed(op, rank_speeds) for op in ops]
    starts, ends = _Run(ops, seconds, overlap).result()
    ranks = sorted({op.rank for op in ops})
    step_s = float(ends.max()) if len(ops) else 0.0
    totals: tuple[dict[int, float], ...] = ({}, {}, {}, {})
    spans = _spans_by_rank(ops, starts, ends)
    for rank in ranks:
        computing, talking = spans.get((rank, "compute"), []), spans.get((rank, "communication"), [])
        busy_s, compute_s = _length(_union(computing + talking)), _length(_union(computing))
        values = (compute_s, _length(_union(talking)), busy_s - compute_s, step_s - busy_s)
        for total, value in zip(totals, values, strict=True):
            total[rank] = value
    return Simulation(tuple(ops), starts, ends, step_s, *(MappingProxyType(item) for item in totals))


def in_issue_order(ops: Iterable[tuple[str, float, Kind, tuple[int, ...]]]) -> tuple[TimedOp, ...]:
    """Ops of one rank, from (name, seconds, kind, after): compute on one stream, communication on another."""
    return tuple(TimedOp(name, seconds, kind, 0, kind, after) for name, seconds, kind, after in ops)


def on_every_rank(ops: Sequence[TimedOp], mesh_shape: Sequence[int]) -> tuple[TimedOp, ...]:
    """The ops of one rank, on every rank of a mesh that runs them: a collective over an axis joins that axis' ranks."""
    copies: list[TimedOp] = []
    for rank, place in enumerate(np.ndindex(*mesh_shape)):
        start = len(copies)
        for index, op in enumerate(ops):
            group = ""
            if op.axis >= 0:
                group = f"{index} of {(*place[: op.axis], '*', *place[op.axis + 1 :])}"
            link = f"{op.link} of rank {rank}" if op.link else ""
            after = tuple(start + item for item in op.after)
            copies.append(replace(op, rank=rank, after=after, group=group, link=link))
    return tuple(copies)


@dataclass(frozen=True, slots=True)
class StepOps:
    """One training step of a mesh whose ranks all run the same ops: those of one rank, and how the ranks differ."""

    ops: tuple[TimedOp, ...]
    mesh_shape: tuple[int, ...]
    rank_speeds: tuple[float, ...] = ()  # as in `simulate`
    overlap: float = 1.0

    @property
    def step_s(self) -> float:
        """Seconds of the step: those of the slowest rank, for which every other one waits, and which waits for none."""
        return simulate(self.ops, rank_speeds=(min(self._speeds(())),), overlap=self.overlap).step_s

    def simulate(self, rank_speeds: Sequence[float] = ()) -> Simulation:
        """The step on every rank if their speeds differ, else on one, which stands for all.

        Given speeds replace those of the machine.
        """
        speeds = self._speeds(rank_speeds)
        if len(set(speeds)) == 1:
            return simulate(self.ops, rank_speeds=speeds[:1], overlap=self.overlap)
        return simulate(on_every_rank(self.ops, self.mesh_shape), rank_speeds=speeds, overlap=self.overlap)

    def _speeds(self, given: Sequence[float]) -> tuple[float, ...]:
        """One speed per rank."""
        speeds, ranks = tuple(given) or self.rank_speeds, math.prod(self.mesh_shape)
        if len(speeds) > ranks:
            raise SimulationError(f"{len(speeds)} rank speeds for {ranks} ranks", fix="give one speed per rank")
        return (*speeds, *[1.0] * (ranks - len(speeds)))


@dataclass(slots=True)
class _Pool:
    """Ops that work at one rate: those on one link, or those that compute on one rank."""

    rank: int = -1  # whose computation it is; -1 for a link
    left: dict[int, float] = field(default_factory=dict)  # op to seconds of work left at rate 1
    rate: float = 1.0
    updated_s: float = 0.0
    version: int = 0  # events of earlier versions are void

    def advance(self, now: float) -> None:
        """Take the time since the last change off the work left."""
        passed = (now - self.updated_s) * self.rate
        for item in self.left:
            self.left[item] -= passed
        self.updated_s = now

    def next_s(self) -> float:
        """When the first op will be done, if nothing changes."""
        least = max(0.0, min(self.left.values()))
        if least == 0:
            return self.updated_s
        return self.updated_s + least / self.rate if self.rate else math.inf

    def take_done(self) -> list[int]:
        """Remove and give the ops that are done now: those with the least work left."""
        least = min(self.left.values())
        done = [item for item, left in self.left.items() if left <= least]
        for item in done:
            del self.left[item]
        return done


class _Run:
    """The event loop. An op is issued once its stream's predecessor is done, and starts once its inputs are."""

    def __init__(self, ops: Sequence[TimedOp], seconds: Sequence[float], overlap: float) -> None:
        self.ops, self.seconds, self.overlap = ops, seconds, overlap
        self.starts = np.zeros(len(ops))
        self.ends = np.zeros(len(ops))
        self.waits = [0] * len(ops)
        self.readers: list[list[int]] = [[] for _ in ops]
        self.members: dict[str, list[int]] = {}
        self.absent: dict[str, int] = {}  # by group: members that are not ready to start
        self.unfinished: dict[str, int] = {}  # by group: members that still work
        self.talking: dict[int, int] = {}  # by rank: communication ops that run
        self.pools: dict[str, _Pool] = {}  # by link, and by rank
        self.events: list[tuple[float, int, str, int]] = []  # (time, op or -1, pool, version of the pool)
        self.done = 0
        self._connect()

    def _connect(self) -> None:
        last: dict[tuple[int, str], int] = {}
        for index, op in enumerate(self.ops):
            before = set(op.after)
            if (op.rank, op.stream) in last:
                before.add(last[op.rank, op.stream])
            last[op.rank, op.stream] = index
            if any(not 0 <= item < len(self.ops) or item == index for item in before):
                raise SimulationError(f"{op.name}: waits for an op that is not there", fix="check its `after`")
            self.waits[index] = len(before)
            for item in before:
                self.readers[item].append(index)
            if op.group:
                self.members.setdefault(op.group, []).append(index)
        self.absent = {group: len(members) for group, members in self.members.items()}
        self.unfinished = dict(self.absent)

    def result(self) -> tuple[Seconds, Seconds]:
        for index, waits in enumerate(self.waits):
            if waits == 0:
                self._ready(index, 0.0)
        while self.events:
            now, index, name, version = heapq.heappop(self.events)
            if index >= 0:
                self._stop(index, now)
            elif version == self.pools[name].version:
                self._stop_first(name, now)
        if self.done < len(self.ops):
            stuck = next(op.name for op, waits in zip(self.ops, self.waits, strict=True) if waits > 0)
            raise SimulationError(
                f"{self.done} of {len(self.ops)} ops ran; {stuck} waits forever",
                fix="ops wait for each other in a circle: check the order of each stream",
            )
        return self.starts, self.ends

    def _ready(self, index: int, now: float) -> None:
        group = self.ops[index].group
        if not group:
            self._start(index, now)
            return
        self.absent[group] -= 1
        if self.absent[group] == 0:
            for member in self.members[group]:
                self._start(member, now)

    def _start(self, index: int, now: float) -> None:
        self.starts[index] = now
        op = self.ops[index]
        if op.kind == "communication":
            self._count_talking(op.rank, 1, now)
        if op.link:
            name, pool = op.link, self.pools.setdefault(op.link, _Pool(updated_s=now))
        elif op.kind == "compute" and self.overlap < 1:
            name, pool = self._computing(op.rank, now)
        else:
            heapq.heappush(self.events, (now + self.seconds[index], index, "", 0))
            return
        pool.advance(now)
        pool.left[index] = self.seconds[index]
        self._schedule(name)

    def _computing(self, rank: int, now: float) -> tuple[str, _Pool]:
        """What a rank computes, whose rate changes as it communicates."""
        name = f"computation of rank {rank}"
        return name, self.pools.setdefault(name, _Pool(rank, updated_s=now))

    def _count_talking(self, rank: int, change: int, now: float) -> None:
        """Note that a rank begins or ends a communication: its compute slows down, or speeds up."""
        before = self.talking.get(rank, 0)
        self.talking[rank] = before + change
        if self.overlap < 1 and (before == 0) != (before + change == 0):
            name, pool = self._computing(rank, now)
            pool.advance(now)
            self._schedule(name)

    def _schedule(self, name: str) -> None:
        pool = self.pools[name]
        pool.version += 1
        if pool.rank >= 0:
            pool.rate = self.overlap if self.talking.get(pool.rank) else 1.0
        elif pool.left:
            pool.rate = 1 / len(pool.left)
        if pool.left and pool.next_s() < math.inf:
            heapq.heappush(self.events, (pool.next_s(), -1, name, pool.version))

    def _stop_first(self, name: str, now: float) -> None:
        pool = self.pools[name]
        pool.advance(now)
        finished = pool.take_done()
        self._schedule(name)
        for item in finished:
            self._stop(item, now)

    def _stop(self, index: int, now: float) -> None:
        """An op's own work is done; a member of a group ends with the last of it."""
        group = self.ops[index].group
        if not group:
            self._finish(index, now)
            return
        self.unfinished[group] -= 1
        if self.unfinished[group] == 0:
            for member in self.members[group]:
                self._finish(member, now)

    def _finish(self, index: int, now: float) -> None:
        self.ends[index] = now
        self.done += 1
        if self.ops[index].kind == "communication":
            self._count_talking(self.ops[index].rank, -1, now)
        for reader in self.readers[index]:
            self.waits[reader] -= 1
            if self.waits[reader] == 0:
                self._ready(reader, now)


def _speed(op: TimedOp, rank_speeds: Sequence[float]) -> float:
    return rank_speeds[op.rank] if op.kind == "compute" and op.rank < len(rank_speeds) else 1.0


Spans: TypeAlias = list[tuple[float, float]]


def _spans_by_rank(ops: Sequence[TimedOp], starts: Seconds, ends: Seconds) -> dict[tuple[int, str], Spans]:
    spans: dict[tuple[int, str], Spans] = {}
    for op, start, end in zip(ops, starts.tolist(), ends.tolist(), strict=True):
        spans.setdefault((op.rank, op.kind), []).append((start, end))
    return spans


def _union(spans: Spans) -> Spans:
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)
