"""What a plan was found to cost, beside its decisions: prices by decision, memory over time, the emitted code.

Plain numbers and texts, saved with the plan and read again with suspicion: none of it decides anything.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from autopar.errors import PlanFormatError

_FIX = "remove this section: a plan is priced anew when make_plan follows it"
MAX_BARS = 4000  # of a saved chart of a pipeline
MAX_POINTS = 1000  # of a saved timeline; the peak is always one of them


@dataclass(frozen=True, slots=True)
class MoveCost:
    """One collective (or local slice) that a decision's inputs need before it can run."""

    collective: str
    axis: int
    bytes: int  # of the full tensor over the axis' group
    seconds: float
    copied: int = 0  # bytes copied on the way: padding, chunks in another order, what all_reduce works on


@dataclass(frozen=True, slots=True)
class EntryCosts:
    """What one decision costs on the largest rank."""

    seconds: float = 0.0
    bytes: int = 0
    moves: tuple[MoveCost, ...] = ()
    where: str = ""  # the user's line

    @property
    def prices(self) -> tuple[float, int, tuple[MoveCost, ...]]:
        """All but the line."""
        return self.seconds, self.bytes, self.moves

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists."""
        moves = [[move.collective, move.axis, move.bytes, move.seconds, move.copied] for move in self.moves]
        return {"seconds": self.seconds, "bytes": self.bytes, "moves": moves, "where": self.where}


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor that is alive at the peak."""

    name: str  # of the parameter or input, or `module/op#occurrence` of the op that makes it
    kind: str
    bytes: int
    where: str = ""  # the user's line

    def to_json(self) -> list[Any]:
        """A plain list."""
        return [self.name, self.kind, self.bytes, self.where]


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Bytes alive on the fullest rank while each op of the emitted program runs: forward, then backward.

    `index`: the ops that are told of, in order: all of them, or else MAX_POINTS, the fullest of its neighbours each.
    `margin_bytes`: of the device, beyond what the plan may hold: the context, NCCL's buffers, fragmentation.
    """

    ops: int
    backward_start: int
    index: tuple[int, ...]
    bytes_by_kind: Mapping[str, tuple[int, ...]]
    peak_index: int
    peak_op: str  # the op that runs then
    peak_where: str
    alive: tuple[LiveTensor, ...]  # at the peak, the largest first
    limit_bytes: int = 0
    margin_bytes: int = 0

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes of all kinds."""
        return tuple(map(sum, zip(*self.bytes_by_kind.values(), strict=True)))

    @property
    def peak_by_kind(self) -> dict[str, int]:
        """Bytes of each kind at the peak."""
        at = self.index.index(self.peak_index)
        return {kind: values[at] for kind, values in self.bytes_by_kind.items()}

    @property
    def peak_text(self) -> str:
        """`in the backward, while mlp/mm#0 runs (op 12 of 40, model.py:7 in forward: ...)`."""
        phase = "backward" if self.peak_index >= self.backward_start else "forward"
        where = f", {self.peak_where}" if self.peak_where else ""
        return f"in the {phase}, while {self.peak_op} runs (op {self.peak_index} of {self.ops}{where})"

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists."""
        return {
            "ops": self.ops,
            "backward_start": self.backward_start,
            "index": list(self.index),
            "bytes_by_kind": {kind: list(values) for kind, values in self.bytes_by_kind.items()},
            "peak": {"index": self.peak_index, "op": self.peak_op, "where": self.peak_where},
            "alive": [tensor.to_json() for tensor in self.alive],
            "limit_bytes": self.limit_bytes,
            "margin_bytes": self.margin_bytes,
        }


@dataclass(frozen=True, slots=True)
class Bar:
    """What a rank of a pipeline does, and from when to when: one stage's part of one microbatch."""

    kind: str  # forward, backward, backward_input or backward_weight
    rank: int
    stage: int
    microbatch: int
    start_s: float
    end_s: float


BAR_KINDS = ("forward", "backward", "backward_input", "backward_weight")


@dataclass(frozen=True, slots=True)
class PlanDetails:
    """What was measured of the emitted program of one rank; of a pipeline, when its stages run, as simulated."""

    timeline: MemoryTimeline | None = None
    code: Mapping[str, str] = field(default_factory=dict)  # of `forward` and `backward`
    chart: tuple[Bar, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists."""
        timeline = None if self.timeline is None else self.timeline.to_json()
        code = {phase: text.splitlines() for phase, text in self.code.items()}
        chart = [[bar.kind, bar.rank, bar.stage, bar.microbatch, bar.start_s, bar.end_s] for bar in self.chart]
        return {"timeline": timeline, "code": code, **({"chart": chart} if chart else {})}


def read_costs(data: Any, axes: int, where: str) -> EntryCosts:
    """What `EntryCosts.to_json` gave, of a mesh of so many axes. Raises PlanFormatError."""
    holder = _Holder(data, where)
    moves = tuple(_move(item, axes, where) for item in holder.list_("moves"))
    return EntryCosts(holder.number("seconds"), int(holder.number("bytes")), moves, holder.text("where"))


def read_details(data: Any) -> PlanDetails:
    """What `PlanDetails.to_json` gave. Raises PlanFormatError."""
    holder = _Holder(data, "details")
    code = {phase: "\n".join(_texts(lines, "details: code")) for phase, lines in holder.dict_("code").items()}
    timeline = None if holder.get("timeline") is None else _timeline(holder.dict_("timeline"))
    chart = tuple(map(_bar, holder.list_("chart"))) if "chart" in holder.data else ()
    return PlanDetails(timeline, code, chart)


def _bar(data: Any) -> Bar:
    where = "details: chart"
    if not isinstance(data, list) or len(data) != 6 or data[0] not in BAR_KINDS:
        raise PlanFormatError(f"{data!r:.60} is no [kind, rank, stage, microbatch, start, end]", where=where, fix=_FIX)
    rank, stage, microbatch = (int(_number(item, where)) for item in data[1:4])
    start_s, end_s = (_number(item, where) for item in data[4:])
    if end_s < start_s:
        raise PlanFormatError(f"a bar ends {start_s - end_s} s before it starts", where=where, fix=_FIX)
    return Bar(data[0], rank, stage, microbatch, start_s, end_s)


def _timeline(data: dict[str, Any]) -> MemoryTimeline:
    holder = _Holder(data, "details: timeline")
    peak = _Holder(holder.dict_("peak"), "details: timeline: peak")
    index = holder.counts("index")
    kinds = _Holder(holder.dict_("bytes_by_kind"), "details: timeline: bytes_by_kind")
    by_kind = {str(kind): kinds.counts(kind) for kind in kinds.data}
    ops = int(holder.number("ops"))
    backward_start, peak_index = int(holder.number("backward_start")), int(peak.number("index"))
    lengths = {len(values) for values in by_kind.values()}
    if lengths != {len(index)} or not _ascends((-1, *index, ops)) or backward_start > ops or peak_index not in index:
        raise PlanFormatError("the timeline's lists do not fit together", where=holder.where, fix=_FIX)
    return MemoryTimeline(
        ops, backward_start, index, by_kind, peak_index, peak.text("op"),
        peak.text("where"), tuple(map(_tensor, holder.list_("alive"))), int(holder.number("limit_bytes")),
        int(holder.number("margin_bytes")),
    )  # fmt: skip


def _ascends(numbers: tuple[int, ...]) -> bool:
    return len(numbers) > 2 and all(first < second for first, second in pairwise(numbers))


def _tensor(data: Any) -> LiveTensor:
    if not isinstance(data, list) or len(data) != 4 or not all(isinstance(data[at], str) for at in (0, 1, 3)):
        raise PlanFormatError(f"{data!r} is no [name, kind, bytes, where]", where="details: timeline: alive", fix=_FIX)
    return LiveTensor(data[0], data[1], int(_number(data[2], "details: timeline: alive")), data[3])


def _move(data: Any, axes: int, where: str) -> MoveCost:
    if not isinstance(data, list) or len(data) != 5 or not isinstance(data[0], str):
        raise PlanFormatError(f"{data!r:.60} is no [collective, axis, bytes, seconds, copied]", where=where, fix=_FIX)
    axis = data[1]
    if not isinstance(axis, int) or isinstance(axis, bool) or not 0 <= axis < axes:
        raise PlanFormatError(f"{axis!r} is no axis of this mesh", where=where, fix=_FIX)
    return MoveCost(data[0], axis, int(_number(data[2], where)), _number(data[3], where), int(_number(data[4], where)))


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
        raise PlanFormatError(f"{value!r} is not a finite number", where=where, fix=_FIX)
    return float(value)


def _texts(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise PlanFormatError("expected a list of texts", where=where, fix=_FIX)
    return value


class _Holder:
    """A dict of the file, read value by value."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise PlanFormatError(f"{data!r:.60} is not a dict", where=where, fix=_FIX)
        self.data, self.where = data, where

    def get(self, name: str) -> Any:
        if name not in self.data:
            raise PlanFormatError(f"{name!r} is missing", where=self.where, fix=_FIX)
        return self.data[name]

    def dict_(self, name: str) -> dict[str, Any]:
        return _Holder(self.get(name), f"{self.where}: {name}").data

    def list_(self, name: str) -> list[Any]:
        value = self.get(name)
        if not isinstance(value, list):
            raise PlanFormatError(f"{name!r} is not a list", where=self.where, fix=_FIX)
        return value

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise PlanFormatError(f"{name!r} is not a text", where=self.where, fix=_FIX)
        return value

    def number(self, name: str) -> float:
        return _number(self.get(name), f"{self.where}: {name}")

    def counts(self, name: str) -> tuple[int, ...]:
        return tuple(int(_number(item, f"{self.where}: {name}")) for item in self.list_(name))
