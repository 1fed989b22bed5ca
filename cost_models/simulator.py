"""Walks timed ops over streams: when each starts and ends, what communication is exposed, how long ranks idle.

Takes in ops in issue order with their durations, streams and dependencies; gives back times. Pure numbers: the planner
turns graphs and plans into ops. A stream is first in, first out; ops of one `group` start together, as the ranks of a
collective do; ops on one `link` share its rate evenly while they overlap.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    group: str = ""  # ops of one group, one per rank, start together
    link: str = ""  # ops on one link at the same time share it


@dataclass(frozen=True, slots=True)
class Simulation:
    """Start and end of every op, and what follows from them. Seconds, from the first op's issue."""

    ops: tuple[TimedOp, ...]
    starts_s: Seconds
    ends_s: Seconds
    step_s: float
    compute_s: Mapping[int, float]  # by rank: time its compute streams are busy
    exposed_communication_s: Mapping[int, float]  # by rank: communicating while nothing computes
    idle_s: Mapping[int, float]  # by rank: neither

    def chrome_trace(self) -> dict[str, Any]:
        """The trace in Chrome's and Perfetto's JSON form; times in microseconds."""
        events = []
        for op, start, end in zip(self.ops, self.starts_s, self.ends_s, strict=True):
            event = {"name": op.name, "cat": op.kind, "ph": "X", "pid": op.rank, "tid": op.stream,
                     "ts": start * 1e6, "dur": (end - start) * 1e6}  # fmt: skip
            events.append(event)
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def write_chrome_trace(self, path: str | Path) -> None:
        """Write the trace to a file that chrome://tracing and ui.perfetto.dev open."""
        Path(path).write_text(json.dumps(self.chrome_trace()))


def simulate(ops: Sequence[TimedOp], *, rank_speeds: Sequence[float] = ()) -> Simulation:
    """Run the ops. `rank_speeds` slows compute of stragglers: 0.5 takes twice as long; missing ranks run at 1."""
    seconds = [op.seconds / _speed(op, rank_speeds) for op in ops]
    starts, ends = _Run(ops, seconds).result()
    ranks = sorted({op.rank for op in ops})
    step_s = float(ends.max()) if len(ops) else 0.0
    compute: dict[int, float] = {}
    exposed: dict[int, float] = {}
    idle: dict[int, float] = {}
    for rank in ranks:
        computing = _spans(ops, starts, ends, rank, "compute")
        talking = _spans(ops, starts, ends, rank, "communication")
        busy_s = _length(_union(computing + talking))
        compute[rank] = _length(_union(computing))
        exposed[rank], idle[rank] = busy_s - compute[rank], step_s - busy_s
    frozen = (MappingProxyType(item) for item in (compute, exposed, idle))
    return Simulation(tuple(ops), starts, ends, step_s, *frozen)


def in_issue_order(ops: Iterable[tuple[str, float, Kind, tuple[int, ...]]]) -> tuple[TimedOp, ...]:
    """Ops of one rank, from (name, seconds, kind, after): compute on one stream, communication on another."""
    return tuple(TimedOp(name, seconds, kind, 0, kind, after) for name, seconds, kind, after in ops)


class _Run:
    """The event loop. An op is issued once its stream's predecessor is done, and starts once its inputs are."""

    def __init__(self, ops: Sequence[TimedOp], seconds: Sequence[float]) -> None:
        self.ops, self.seconds = ops, seconds
        self.starts = np.zeros(len(ops))
        self.ends = np.zeros(len(ops))
        self.waits = [0] * len(ops)
        self.readers: list[list[int]] = [[] for _ in ops]
        self.group_waits: dict[str, int] = {}
        self.group_members: dict[str, list[int]] = {}
        self.active: dict[str, dict[int, float]] = {}  # by link: op to seconds of work left
        self.updated_s: dict[str, float] = {}
        self.version: dict[str, int] = {}
        self.events: list[tuple[float, int, str, int]] = []  # (time, op or -1, link, version of the link)
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
                self.group_members.setdefault(op.group, []).append(index)
        self.group_waits = {group: len(members) for group, members in self.group_members.items()}

    def result(self) -> tuple[Seconds, Seconds]:
        for index, waits in enumerate(self.waits):
            if waits == 0:
                self._ready(index, 0.0)
        while self.events:
            now, index, link, version = heapq.heappop(self.events)
            if index >= 0:
                self._finish(index, now)
            elif version == self.version[link]:
                self._finish_on_link(link, now)
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
        self.group_waits[group] -= 1
        if self.group_waits[group] == 0:
            for member in self.group_members[group]:
                self._start(member, now)

    def _start(self, index: int, now: float) -> None:
        self.starts[index] = now
        link = self.ops[index].link
        if not link:
            heapq.heappush(self.events, (now + self.seconds[index], index, "", 0))
            return
        self._advance(link, now)
        self.active[link][index] = self.seconds[index]
        self._schedule(link, now)

    def _advance(self, link: str, now: float) -> None:
        """Take the time since the last change off the work left on a link."""
        working = self.active.setdefault(link, {})
        passed = now - self.updated_s.get(link, now)
        for item in working:
            working[item] -= passed / len(working)
        self.updated_s[link] = now

    def _schedule(self, link: str, now: float) -> None:
        self.version[link] = self.version.get(link, 0) + 1
        working = self.active[link]
        if working:
            next_s = now + max(0.0, min(working.values())) * len(working)
            heapq.heappush(self.events, (next_s, -1, link, self.version[link]))

    def _finish_on_link(self, link: str, now: float) -> None:
        self._advance(link, now)
        working = self.active[link]
        least = min(working.values())
        finished = [item for item, left in working.items() if left <= least]
        for item in finished:
            del working[item]
        self._schedule(link, now)
        for item in finished:
            self._finish(item, now)

    def _finish(self, index: int, now: float) -> None:
        self.ends[index] = now
        self.done += 1
        for reader in self.readers[index]:
            self.waits[reader] -= 1
            if self.waits[reader] == 0:
                self._ready(reader, now)


def _speed(op: TimedOp, rank_speeds: Sequence[float]) -> float:
    return rank_speeds[op.rank] if op.kind == "compute" and op.rank < len(rank_speeds) else 1.0


def _spans(ops: Sequence[TimedOp], starts: Seconds, ends: Seconds, rank: int, kind: Kind) -> list[tuple[float, float]]:
    return [(float(starts[i]), float(ends[i])) for i, op in enumerate(ops) if op.rank == rank and op.kind == kind]


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(spans: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)
