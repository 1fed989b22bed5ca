"""The chart of a pipeline: what each rank computes, and when; as the plan foresees it, or as it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autopar.errors import PlanError
from autopar.plan_details import Bar
from autopar.plots import new_figure
from autopar.recording import STAGE_KINDS, Span

if TYPE_CHECKING:
    from autopar.plan import Plan
    from autopar.recording import Recording

COLORS = {"forward": "#4477aa", "backward": "#228833", "backward_input": "#66bb77", "backward_weight": "#ccbb44"}
"""Paul Tol's bright scheme, as the pictures of memory have it."""
LETTERS = {"forward": "F", "backward": "B", "backward_input": "b", "backward_weight": "w"}
WIDTH, ROW = 5.2, 0.42  # inches
LABELLED = 60  # bars of a rank; beyond, their numbers would not be read


def planned_bars(plan: Plan) -> tuple[Bar, ...]:
    """The simulated schedule. Raises PlanError where it is not known."""
    bars = plan.details.chart if plan.details is not None else ()
    if not bars:
        raise PlanError(
            "this plan has no chart of a pipeline" if plan.pipeline is None else "the chart is not in this file",
            fix="plan with stages=" if plan.pipeline is None else "give it to make_plan with plan=, and save it",
        )
    return bars


def measured_bars(recording: Recording) -> tuple[Bar, ...]:
    """The last recorded step of a pipeline; nothing of a run without stages."""
    spans = [span for span in recording.of_last_step() if span.kind in STAGE_KINDS]
    return tuple(Bar(it.kind, it.rank, it.stage, it.microbatch, it.start_s, it.end_s) for it in spans)


def predicted_spans(plan: Plan) -> tuple[Span, ...]:
    """The simulated schedule as a recording's trace takes it. Raises PlanError where it is not known."""
    return tuple(
        Span(it.kind, it.kind, it.start_s, it.end_s, it.rank, stage=it.stage, microbatch=it.microbatch)
        for it in planned_bars(plan)
    )


def text_gantt(bars: Sequence[Bar], width: int = 100) -> str:
    """One line for each rank: what it computes over time. `F`, `B`, `b`, `w` and the microbatch, where there is room
    for all of its number; `.` is a bubble."""
    begin_s = min(bar.start_s for bar in bars)
    column_s = (max(bar.end_s for bar in bars) - begin_s) / width or 1.0
    lines = {rank: ["."] * width for rank in sorted({bar.rank for bar in bars})}
    for bar in sorted(bars, key=lambda it: it.start_s):
        first = min(width - 1, round((bar.start_s - begin_s) / column_s))
        last = max(first + 1, min(width, round((bar.end_s - begin_s) / column_s)))
        letter, room = LETTERS[bar.kind], last - first
        label = f"{letter}{bar.microbatch}"
        lines[bar.rank][first:last] = (label if len(label) <= room else letter).ljust(room, "-")
    return "\n".join(f"rank {rank:<3} {''.join(line)}" for rank, line in lines.items())


def bubble_of(bars: Sequence[Bar]) -> float:
    """The share of the time from the first bar to the last, over all ranks, in which none computes."""
    ranks = len({bar.rank for bar in bars})
    whole = max(bar.end_s for bar in bars) - min(bar.start_s for bar in bars)
    return 1 - sum(bar.end_s - bar.start_s for bar in bars) / (ranks * whole) if whole else 0.0


def draw_gantt(bars: Sequence[Bar], title: str) -> Any:
    """Ranks down, time across, kinds by colour; the number in a bar is the microbatch's."""
    ranks = sorted({bar.rank for bar in bars})
    figure = new_figure(WIDTH, 1.5 + ROW * len(ranks))
    axes = figure.add_subplot()
    for kind, color in COLORS.items():
        own = [bar for bar in bars if bar.kind == kind]
        for row, rank in enumerate(ranks):
            spans = [(1e3 * bar.start_s, 1e3 * (bar.end_s - bar.start_s)) for bar in own if bar.rank == rank]
            axes.broken_barh(spans, (row - 0.42, 0.84), facecolors=color, edgecolors="white", linewidth=0.3)
        if own:
            axes.barh(0, 0, color=color, label=kind.replace("_", " "))
    if len(bars) <= LABELLED * len(ranks):
        _number(axes, bars, ranks)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlim(0, max(1e3 * max(bar.end_s for bar in bars), 1e-9))
    axes.set(xlabel="ms", title=f"{title}: bubble {bubble_of(bars):.0%}")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _number(axes: Any, bars: Sequence[Bar], ranks: Sequence[int]) -> None:
    """Write microbatches into the bars that are wide enough for it."""
    narrow = max(bar.end_s for bar in bars) * 0.012
    for bar in bars:
        if bar.end_s - bar.start_s > narrow:
            place = 1e3 * (bar.start_s + bar.end_s) / 2, ranks.index(bar.rank)
            axes.text(*place, str(bar.microbatch), ha="center", va="center", fontsize=6.5, color="#ffffff")
