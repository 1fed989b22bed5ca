"""A recorded run beside its plan: the step, computation, communication and memory, by module; experts' loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from autopar.errors import RecordingError
from autopar.folding import fold_keys
from autopar.plots import new_figure
from autopar.recording import COMPUTE, MESSAGE_KINDS, WAIT, Recording, Span
from autopar.report.figures import bytes_text, rendered, seconds_text
from autopar.report.gantt import bubble_of, measured_bars, text_gantt

if TYPE_CHECKING:
    from autopar.plan import Plan

_COUNTED = "counted by tensor, without what kernels need inside"
_ALLOCATED = "all that PyTorch's allocator gave out on the device"
_MEANT = (
    "it has the whole batch in it, of which a plan counts each rank's part; the optimizer's own step is not looked into"
)


@dataclass(frozen=True, slots=True)
class Line:
    """One row: as predicted (None: the plan does not say) and as measured; seconds, or what `text` writes."""

    name: str
    predicted: float | None
    measured: float
    copies: int = 1
    text: Callable[[float], str] = seconds_text

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing was predicted."""
        return self.measured / self.predicted if self.predicted else None

    @property
    def texts(self) -> tuple[str, str, str]:
        """Predicted, measured, ratio."""
        predicted = "-" if self.predicted is None else self.text(self.predicted)
        return predicted, self.text(self.measured), "-" if self.ratio is None else f"{self.ratio:.2f}"


def check_recording(plan: Plan, recording: Recording) -> None:
    """Raise RecordingError for a run of another plan."""
    if recording.plan_hash != plan.hash:
        raise RecordingError(
            f"the recording is of plan {recording.plan_hash}, this is plan {plan.hash}",
            fix="save the plan that ran: pmodel.plan.save(path)",
        )


def totals(plan: Plan, recording: Recording) -> list[Line]:
    """The step, the memory; of a program without stages also what the first rank computes and what it waits for."""
    lines, peak = [Line("step, the optimizer in it", plan.step_s or None, recording.typical_s)], recording.peak
    if peak is not None:
        lines.append(Line("memory of the fullest rank", plan.peak_bytes or None, peak.held_bytes, text=bytes_text))
    bars, known = measured_bars(recording), plan.pipeline
    if bars and known is not None:
        lines.append(Line("bubble, of the time of all ranks", known.bubble or None, bubble_of(bars), text=_share))
        waits = _waits(recording)
        if waits:
            lines.append(Line("waiting for messages, the rank that waits most", None, max(waits.values())))
    modules = recording.by_module()
    if not modules:
        return lines
    compute = sum(own[COMPUTE] for own in modules.values())
    wait = sum(own[WAIT] for own in modules.values())
    exposed = None if plan.step_ops is None else plan.simulate().exposed_communication_s[0]
    updates = sum(op.seconds for op in plan.step_ops.ops if op.name.startswith("update ")) if plan.step_ops else 0.0
    busy = None if plan.step_ops is None else plan.simulate().compute_s[0] - updates
    return [
        *lines,
        Line("computation, without the optimizer", busy, compute),
        Line("waiting for communication", exposed, wait),
    ]


def _share(part: float) -> str:
    return f"{part:.1%}"


def _waits(recording: Recording) -> dict[int, float]:
    """By rank, the seconds in one step for which it waited for messages; none where messages were not recorded."""
    waits: dict[int, float] = {}
    for span in recording.of_last_step():
        if span.kind in MESSAGE_KINDS and span.kind.startswith("recv"):
            waits[span.rank] = waits.get(span.rank, 0.0) + span.seconds
    return waits


def by_module(plan: Plan, recording: Recording) -> list[Line]:
    """Repeated modules that decide alike folded: computation, and waits for communication, of forward and backward."""
    predicted: dict[str, float] = {}
    signatures: dict[str, list[tuple[str, ...]]] = {}
    for entry in plan.entries:
        predicted[entry.module] = predicted.get(entry.module, 0.0) + entry.total_s
        tail = entry.key.removeprefix(entry.module)
        signatures.setdefault(entry.module, []).append((tail, *entry.signature()))
    measured = {module: own[COMPUTE] + own[WAIT] for module, own in recording.by_module().items()}
    lines = []
    for text, members in fold_keys({name: tuple(own) for name, own in signatures.items()}).items():
        known = [name for name in members if name in measured]
        if known:
            seconds = sum(predicted[name] for name in members)
            lines.append(Line(text or "(model)", seconds, sum(measured[name] for name in known), len(members)))
    rest = sum(seconds for name, seconds in measured.items() if name not in signatures)
    return [*lines, *([Line("(elsewhere)", None, rest)] if rest else [])]


def remarks(plan: Plan, recording: Recording) -> Iterator[str]:
    """What must be known to read the numbers."""
    timed, plain = len(recording.timed_steps), sum(seconds is not None for seconds in recording.step_s)
    yield (
        f"{len(recording.step_s)} steps recorded on {recording.device}: {plain} ran as always, and their median is the "
        "step's time"
    )
    if recording.by_module():
        yield f"{timed} ran op by op, for the times of modules on rank 0: each op then waits for the one before"
    if recording.peak is not None:
        how = _COUNTED if recording.device == "cpu" else _ALLOCATED
        yield f"memory: most in the {_place(recording.peak)}; {how}; {_MEANT}"
    if plan.hardware != "cpu" and recording.device == "cpu":
        yield (
            f"the plan was made for {plan.hardware} and ran on a CPU: compare shares, not seconds; "
            "autopar calibrate makes a profile of this machine"
        )


def _place(span: Span) -> str:
    what = span.name if span.stage < 0 else f"{span.kind} of stage {span.stage}, microbatch {span.microbatch}"
    module = f" ({span.module})" if span.module else ""
    return f"{span.phase} on rank {span.rank}, while {what}{module} ran"


def measured_text(plan: Plan, recording: Recording) -> str:
    """The tables as text."""
    check_recording(plan, recording)
    parts: list[object] = [_table("", totals(plan, recording))]
    modules = sorted(by_module(plan, recording), key=lambda line: -line.measured)
    if modules:
        parts.append(_table("module", modules))
    bars = measured_bars(recording)
    if bars:
        parts.append(f"measured, one step:\n{text_gantt(bars)}\n")
    return rendered(*parts, *(f"note: {text}" for text in remarks(plan, recording)))


def _table(name: str, lines: Sequence[Line]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(name, overflow="fold")
    for column in ("predicted", "measured", "ratio"):
        table.add_column(column, justify="right")
    for line in lines:
        table.add_row(line.name + (f"  x{line.copies}" if line.copies > 1 else ""), *line.texts)
    return table


def draw_held(plan: Plan, recording: Recording) -> Any:
    """Bytes on the fullest rank over one step: as measured, and as predicted where the plan tells.

    Of a program without stages, op by op, forward beside forward and backward beside backward.
    """
    spans = recording.held_over_time()
    figure = new_figure(5.2, 3.3)
    axes = figure.add_subplot()
    timeline = plan.details.timeline if plan.details else None
    if timeline is None:
        measured = [[span.held_bytes for span in spans]]
        axes.set_xticks([])
        axes.set_xlabel("the step's actions, in order")
        if plan.peak_bytes:
            axes.axhline(plan.peak_bytes / 1e9, color="#ee6677", linestyle="--", label="predicted peak")
    else:
        measured = [[span.held_bytes for span in spans if span.phase == phase] for phase in ("forward", "backward")]
        axes.set_xticks([0.5, 1.5], ["ops of the forward", "of the backward"])
        begin = int(np.searchsorted(timeline.index, timeline.backward_start))
        predicted = [_from_first_op(timeline.totals[:begin]), _from_first_op(timeline.totals[begin:])]
        axes.plot(*_steps(predicted), drawstyle="steps-post", color="#ee6677", linestyle="--", label="predicted")
    axes.plot(*_steps(measured), drawstyle="steps-post", color="#4477aa", label="measured")
    axes.set(ylabel="GB on the fullest rank", title="memory, measured and predicted")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    return figure


def _from_first_op(totals: Sequence[int]) -> Sequence[int]:
    """Without what is the same at the beginning, where a program takes up its inputs."""
    first = next((place for place, bytes_ in enumerate(totals) if bytes_ != totals[0]), 0)
    return totals[first:]


def _steps(parts: Sequence[Sequence[int]]) -> tuple[list[float], list[float]]:
    """Places and GB of parts one after the other, each as wide as 1; the last value lasts to the end."""
    places = [part + place / len(values) for part, values in enumerate(parts) for place in range(len(values))]
    held = [bytes_ / 1e9 for values in parts for bytes_ in values]
    return [*places, float(len(parts))], [*held, held[-1]]


def expert_rows(recording: Recording) -> list[Sequence[object]]:
    """By layer: tokens, the most chosen expert, its load over the mean; of the groups of ranks likewise."""
    rows: list[Sequence[object]] = []
    for layer, load in recording.expert_load.items():
        counts, groups = np.asarray(load, dtype=np.float64), group_loads(recording, layer)
        most = int(counts.argmax())
        rows.append((layer, int(counts.sum()), most, _over_mean(counts), len(groups), _over_mean(groups)))
    return rows


def least_even(recording: Recording) -> str:
    """The layer whose most chosen expert is farthest above the mean."""
    return max(recording.expert_load, key=lambda layer: _over_mean(np.asarray(recording.expert_load[layer]))[0])


def group_loads(recording: Recording, layer: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The tokens that each group of ranks computes."""
    return np.asarray(recording.group_load.get(layer, (sum(recording.expert_load[layer]),)), dtype=np.float64)


def _over_mean(loads: np.ndarray[Any, Any]) -> tuple[float, str]:
    mean = loads.mean() if len(loads) else 0.0
    value = float(loads.max() / mean) if mean else 1.0
    return value, f"{value:.2f}"


def draw_experts(recording: Recording, layer: str) -> Any:
    """One layer: tokens by expert, and by the group of ranks that holds them, with their means."""
    figure = new_figure(5.2, 3.6)
    pairs = (("expert", np.asarray(recording.expert_load[layer], dtype=np.float64)),
             ("group of ranks", group_loads(recording, layer)))  # fmt: skip
    for axes, (name, loads) in zip(figure.subplots(2, 1), pairs, strict=True):
        axes.bar(range(len(loads)), loads, color="#4477aa")
        axes.axhline(loads.mean(), linestyle="--", linewidth=1, color="black")
        axes.set(xlabel=name, ylabel="tokens")
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(f"load of {layer[:40]}".replace("$", r"\$"), fontsize=11)
    return figure
