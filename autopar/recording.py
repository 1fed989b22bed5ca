"""A run as it was measured: how long steps took, what each rank did and held when, how many tokens each expert got.

Plain data, saved as JSON and read with suspicion; the runtime fills it, reports set it beside a plan.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from autopar.errors import RecordingError
from autopar.written_files import written_file

FORMAT = "autopar recording"
COMPUTE, WAIT, COLLECTIVE = "compute", "wait", "collective"
OP_KINDS = (COMPUTE, WAIT, COLLECTIVE)
STAGE_KINDS = ("forward", "backward", "backward_input", "backward_weight")
MESSAGE_KINDS = ("send_activation", "send_gradient", "recv_activation", "recv_gradient")
PREDICTED = 1_000_000  # added to the number of a rank's process in a trace, for what was predicted of it
_FIX = "give a file that recording.save wrote"


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work: seconds from the beginning of its step, when all ranks had agreed on the call.

    `kind`: of an op, `compute`, `wait` (for a collective) or `collective` (from its issue to the end of its wait); of a
    pipeline's stage, what its action does: a send until it is under way, a recv while its reader waits for it. `phase`:
    `forward` or `backward`. `held_bytes`: the most that its rank held on its device meanwhile; -1: not measured.
    """

    name: str
    kind: str
    start_s: float
    end_s: float
    rank: int = 0
    step: int = 0
    module: str = ""
    phase: str = ""
    stage: int = -1
    microbatch: int = -1
    held_bytes: int = -1

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Recording:
    """Some steps of one run, the same on every rank that took part.

    `step_s`: of each step, from its call to the next one's, with the optimizer and the loader; None for a step that
    ran op by op, which takes longer. `expert_load`: by layer, choices by expert; `group_load`: those that each
    group of ranks computed.
    """

    plan_hash: str
    mesh_shape: tuple[int, ...]
    device: str
    step_s: tuple[float | None, ...] = ()
    spans: tuple[Span, ...] = ()
    expert_load: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    group_load: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def typical_s(self) -> float:
        """The median of the steps that ran as they always do; where there is none, of all that were timed op by op."""
        plain = [seconds for seconds in self.step_s if seconds is not None]
        return statistics.median(plain) if plain else math.nan

    @property
    def timed_steps(self) -> tuple[int, ...]:
        """The steps of which spans are known."""
        return tuple(sorted({span.step for span in self.spans}))

    @property
    def peak(self) -> Span | None:
        """Where a rank held the most; None of a run whose memory was not measured."""
        fullest = max(self.spans, key=lambda span: span.held_bytes, default=None)
        return fullest if fullest is not None and fullest.held_bytes >= 0 else None

    def of_last_step(self) -> tuple[Span, ...]:
        """The spans of the last step that has any: of one that ran as always, if there is one."""
        timed = self.timed_steps
        plain = [step for step in timed if step < len(self.step_s) and self.step_s[step] is not None]
        last = max(plain or timed, default=-1)
        return tuple(span for span in self.spans if span.step == last)

    def held_over_time(self) -> tuple[Span, ...]:
        """In order, the spans of the rank and the step that held the most."""
        peak = self.peak
        if peak is None:
            return ()
        own = [span for span in self.spans if (span.rank, span.step) == (peak.rank, peak.step) and span.held_bytes >= 0]
        return tuple(sorted(own, key=lambda span: span.start_s))

    def by_module(self, rank: int = 0) -> dict[str, dict[str, float]]:
        """By module, seconds of `compute` and of `wait` on one rank: the median of the steps that ran op by op."""
        sums: dict[tuple[str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for span in self.spans:
            if span.rank == rank and span.kind in (COMPUTE, WAIT):
                sums[span.module, span.kind][span.step] += span.seconds
        found: dict[str, dict[str, float]] = defaultdict(lambda: {COMPUTE: 0.0, WAIT: 0.0})
        for (module, kind), by_step in sums.items():
            found[module][kind] = statistics.median([by_step.get(step, 0.0) for step in self.timed_steps])
        return dict(found)

    def chrome_trace(self, *, predicted: Iterable[Span] = ()) -> dict[str, Any]:
        """All spans in Chrome's and Perfetto's JSON form, a process for each rank; steps one after the other.

        `predicted`: of one step (`autopar.report.gantt.predicted_spans`), drawn beside the first.
        """
        starts, at = {}, 0.0
        for step in self.timed_steps:
            starts[step] = at
            at += max(span.end_s for span in self.spans if span.step == step)
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}, measured"}}
            for rank in sorted({span.rank for span in self.spans})
        ]
        events += [{**_event(span, 0.0), "pid": PREDICTED + span.rank} for span in predicted]
        events += [
            {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"rank {pid - PREDICTED}, predicted"}}
            for pid in sorted({event["pid"] for event in events if event["pid"] >= PREDICTED})
        ]
        for span in self.spans:
            events.append(_event(span, starts[span.step]))
            if span.held_bytes >= 0:
                events.append(
                    {"name": "memory", "ph": "C", "pid": span.rank, "args": {"bytes": span.held_bytes},
                     "ts": 1e6 * (starts[span.step] + span.start_s)}
                )  # fmt: skip
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_trace(self, path: str | os.PathLike[str], *, predicted: Iterable[Span] = ()) -> None:
        """Write `chrome_trace` to a file that chrome://tracing and ui.perfetto.dev open."""
        with written_file(path) as file:
            file.write_text(json.dumps(self.chrome_trace(predicted=predicted)), encoding="utf-8")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON: `Recording.load` reads it, and `autopar report --recording` sets it beside the plan."""
        data = {"format": FORMAT, **asdict(self), "spans": [list(asdict(span).values()) for span in self.spans]}
        with written_file(path) as file:
            file.write_text(json.dumps(data) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """Read what `save` wrote. Raises RecordingError."""
        try:
            return _read(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise RecordingError(f"not a readable recording: {error}", where=str(path), fix=_FIX) from error


def _event(span: Span, began_s: float) -> dict[str, Any]:
    """A span of a step that began then, as an event of a trace."""
    label = span.name if span.stage < 0 else f"{span.kind} {span.stage}.{span.microbatch}"
    stream = "communication" if span.kind in (COLLECTIVE, *MESSAGE_KINDS) else "compute"
    return {
        "name": label, "cat": span.kind, "ph": "X", "pid": span.rank, "tid": stream,
        "ts": 1e6 * (began_s + span.start_s), "dur": 1e6 * span.seconds,
        "args": {"module": span.module, "phase": span.phase, "step": span.step},
    }  # fmt: skip


def _read(data: Any) -> Recording:
    if data["format"] != FORMAT:
        raise ValueError(f"its format is {data['format']!r:.60}")
    return Recording(
        plan_hash=_text(data["plan_hash"]),
        mesh_shape=tuple(map(_count, data["mesh_shape"])),
        device=_text(data["device"]),
        step_s=tuple(None if value is None else _seconds(value) for value in data["step_s"]),
        spans=tuple(map(_span, data["spans"])),
        expert_load={_text(layer): tuple(map(_count, load)) for layer, load in data["expert_load"].items()},
        group_load={_text(layer): tuple(map(_count, load)) for layer, load in data["group_load"].items()},
    )


def _span(values: Any) -> Span:
    named = fields(Span)[: len(values)]  # older files have no bytes
    checks: dict[str, Callable[[Any], Any]] = {"str": _text, "float": _seconds, "int": int}
    made = Span(**{item.name: checks[str(item.type)](value) for item, value in zip(named, values, strict=True)})
    if made.kind not in (*OP_KINDS, *STAGE_KINDS, *MESSAGE_KINDS) or made.end_s < made.start_s:
        raise ValueError(f"{values!r:.80} is no span")
    return made


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.60} is no text")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r:.60} is no time")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r:.60} is no count")
    return value
