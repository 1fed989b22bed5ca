"""Pictures of a plan: memory over time by kind, the frontier, communication by collective and axis."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from autopar.errors import PlanError
from autopar.plots import new_figure, save_figure
from autopar.report.figures import bytes_text
from autopar.report.frontier import draw_frontier
from autopar.report.gantt import draw_gantt, planned_bars

if TYPE_CHECKING:
    from autopar.plan import Plan
    from autopar.plan_details import MemoryTimeline

KIND_COLORS = {
    "parameter": "#4477aa", "optimizer_state": "#66ccee", "gradient": "#228833", "saved": "#ccbb44",
    "activation": "#ee6677", "gathered": "#aa3377", "collective": "#ee8866", "input": "#8899aa", "output": "#99aabb",
    "buffer": "#77aadd",
}  # fmt: skip
"""Paul Tol's bright and light schemes, which people of every colour vision tell apart; the longest living lowest."""
LABEL = 30  # characters
PIXELS = 1000  # across a picture
NARROW, TALL = 5.2, 3.3  # inches: on a phone as it is, on a desk twice beside each other


def plot_plan(plan: Plan, kind: str, path: str | os.PathLike[str] | None = None) -> Any:
    """Draw one kind of picture; written to `path`, or returned as a figure."""
    if kind not in PICTURES:
        raise PlanError(f"there is no picture of {kind!r}", fix=f"ask for one of {', '.join(PICTURES)}")
    figure = PICTURES[kind](plan)
    if path is None:
        return figure
    save_figure(figure, path, dpi=150)
    return None


def timeline_of(plan: Plan) -> MemoryTimeline:
    """The plan's memory over time. Raises PlanError where it is not known."""
    if plan.details is None or plan.details.timeline is None:
        raise PlanError(
            "the memory of this plan over time is not known: it was edited, foreseen, or saved by an older version",
            fix="plan.emitted(), or give it to make_plan with plan=",
        )
    return plan.details.timeline


def _memory(plan: Plan) -> Any:
    timeline = timeline_of(plan)
    figure = new_figure(NARROW, TALL + 0.4)
    axes = figure.add_subplot()
    kinds = [kind for kind in KIND_COLORS if kind in timeline.bytes_by_kind]
    series = [[bytes_ / 1e9 for bytes_ in timeline.bytes_by_kind[kind]] for kind in kinds]
    colors, labels = [KIND_COLORS[kind] for kind in kinds], [kind.replace("_", " ") for kind in kinds]
    axes.stackplot(timeline.index, *series, colors=colors, labels=labels, step="post", linewidth=0)
    axes.axvline(timeline.backward_start, color="black", linewidth=0.8, linestyle=":")
    top = max(timeline.totals) / 1e9
    axes.annotate(
        "backward", (timeline.backward_start, top * 1.1), fontsize=8, xytext=(3, 0), textcoords="offset points"
    )
    axes.plot([timeline.peak_index], [top], marker="v", color="black", markersize=5)
    if 0 < timeline.limit_bytes < 2.5e9 * top:
        axes.axhline(timeline.limit_bytes / 1e9, color="black", linewidth=1, linestyle="--", label="limit")
        if timeline.margin_bytes:
            ends = (timeline.limit_bytes / 1e9, (timeline.limit_bytes + timeline.margin_bytes) / 1e9)
            axes.axhspan(*ends, color="#bbbbbb", alpha=0.4, label="margin")
    axes.set(xlabel="op of the emitted program", ylabel="GB on the fullest rank", title="memory over one step")
    axes.set_xlim(0, max(1, timeline.ops - 1))
    axes.set_ylim(bottom=0, top=max(axes.get_ylim()[1], 1.2 * top))
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def communication_of(plan: Plan) -> dict[tuple[str, str], tuple[int, int, float]]:
    """By (collective, axis name): how many, bytes, seconds; of a pipeline, of one microbatch in all stages."""
    totals: dict[tuple[str, str], tuple[int, int, float]] = defaultdict(lambda: (0, 0, 0.0))
    for part in (plan, *(stage.plan for stage in plan.stages)):
        for move in (move for entry in part.entries for move in entry.moves):
            key = move.collective, part.axis_names[move.axis]
            number, bytes_, seconds = totals[key]
            totals[key] = number + 1, bytes_ + move.bytes, seconds + move.seconds
    return dict(sorted(totals.items(), key=lambda item: -item[1][2]))


def _communication(plan: Plan) -> Any:
    totals = {key: value for key, value in communication_of(plan).items() if value[2] > 0}
    figure = new_figure(NARROW, max(1.6, 0.8 + 0.36 * len(totals)))
    axes = figure.add_subplot()
    labels = [_plain(f"{collective}, {axis}") for collective, axis in totals]
    bars = axes.barh(labels, [1e3 * seconds for _, _, seconds in totals.values()], color="#4477aa")
    axes.bar_label(
        bars, [f"{number} x, {bytes_text(bytes_)}" for number, bytes_, _ in totals.values()], padding=3, fontsize=8
    )
    axes.invert_yaxis()
    axes.margins(x=0.35)
    axes.set(xlabel="ms in one step, hidden or not", title="communication by collective and mesh axis")
    return figure


def _plain(text: str) -> str:
    """Text that matplotlib takes for nothing else, since a dollar begins a formula, and that leaves room to draw."""
    short = text if len(text) <= LABEL else f"{text[: LABEL - 3]}..."
    return short.replace("$", r"\$")


def _frontier(plan: Plan) -> Any:
    figure = new_figure(NARROW, TALL)
    draw_frontier(figure.add_subplot(), plan.frontier)
    return figure


def _step(plan: Plan) -> Any:
    """What each stream of the first rank does."""
    simulation = plan.simulate()
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for op, start, end in zip(simulation.ops, simulation.starts_s.tolist(), simulation.ends_s.tolist(), strict=True):
        if op.rank == 0 and end > start:
            _extend(spans[op.stream], 1e3 * start, 1e3 * end, 1e3 * simulation.step_s / PIXELS)
    figure = new_figure(NARROW, 1.2 + 0.45 * len(spans))
    axes = figure.add_subplot()
    for row, (stream, found) in enumerate(spans.items()):
        color = "#4477aa" if stream == "compute" else "#ee6677"
        axes.broken_barh([(start, end - start) for start, end in found], (row - 0.4, 0.8), facecolors=color)
    axes.set_yticks(range(len(spans)), [_plain(stream.replace("communication, ", "")) for stream in spans])
    axes.invert_yaxis()
    axes.set_xlim(0, max(1e3 * simulation.step_s, 1e-9))
    axes.set(xlabel="ms", title="one step on one rank, by stream")
    return figure


def _extend(spans: list[tuple[float, float]], start: float, end: float, gap: float) -> None:
    """Add a span; one that follows within less than a pixel lengthens the last."""
    if spans and start - spans[-1][1] < gap:
        spans[-1] = spans[-1][0], max(end, spans[-1][1])
    else:
        spans.append((start, end))


def _schedule(plan: Plan) -> Any:
    bars = planned_bars(plan)
    return draw_gantt(bars, plan.pipeline.schedule if plan.pipeline is not None else "")


PICTURES = {
    "schedule": _schedule,
    "step": _step,
    "memory": _memory,
    "frontier": _frontier,
    "communication": _communication,
}
