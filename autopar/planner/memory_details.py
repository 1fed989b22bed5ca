"""Memory over time, for people: the timeline of the emitted program with the optimizer's state, and who is alive."""

from __future__ import annotations

import numpy as np

from autopar.plan_details import MAX_POINTS, LiveTensor, MemoryTimeline
from autopar.planner.liveness import Timeline

ALIVE = 200  # tensors told of


def memory_details(timeline: Timeline, state_bytes: int, limit_bytes: int, device_bytes: int) -> MemoryTimeline | None:
    """The timeline with the optimizer's state beside it; None of a program without ops."""
    if not timeline.nodes:
        return None
    index = _told(timeline.totals)
    by_kind: dict[str, tuple[int, ...]] = {
        kind: tuple(values[at] for at in index) for kind, values in timeline.bytes_by_kind.items() if any(values)
    }
    if state_bytes:
        by_kind["optimizer_state"] = (state_bytes,) * len(index)
    peak = timeline.peak_index
    alive = [
        LiveTensor(life.name, life.kind, life.bytes, life.where)
        for life in timeline.lifetimes
        if life.first <= peak <= life.last and life.bytes
    ]
    if state_bytes:
        alive.append(LiveTensor("the optimizer's state", "optimizer_state", state_bytes))
    alive.sort(key=lambda tensor: -tensor.bytes)
    return MemoryTimeline(
        ops=len(timeline.nodes),
        backward_start=timeline.backward_start,
        index=index,
        bytes_by_kind=by_kind,
        peak_index=peak,
        peak_op=timeline.labels[peak][0],
        peak_where=timeline.labels[peak][1],
        alive=tuple(alive[:ALIVE]),
        limit_bytes=limit_bytes,
        margin_bytes=max(0, device_bytes - limit_bytes),
    )


def _told(totals: tuple[int, ...]) -> tuple[int, ...]:
    """All ops, or of each of MAX_POINTS runs of neighbours the fullest."""
    if len(totals) <= MAX_POINTS:
        return tuple(range(len(totals)))
    runs = np.array_split(np.array(totals), MAX_POINTS)
    starts = np.cumsum([0, *(len(run) for run in runs[:-1])])
    return tuple(int(start + run.argmax()) for start, run in zip(starts, runs, strict=True))
