"""Sections of the page about time that passes: a pipeline's chart, a recorded run beside the plan, experts' loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from autopar.report.gantt import draw_gantt, measured_bars, planned_bars
from autopar.report.measured import Line, by_module, draw_experts, draw_held, expert_rows, least_even, remarks, totals
from autopar.report.page_parts import NOT_FOUND, chart, data_table

if TYPE_CHECKING:
    from autopar.plan import Plan
    from autopar.recording import Recording


def measured_parts(plan: Plan, recording: Recording | None) -> Iterator[str]:
    """What was measured beside what was predicted."""
    if recording is None:
        yield (
            f'<p class="missing">{NOT_FOUND}<code>with pmodel.record() as recorder: ...</code> times a run, '
            "<code>autopar report plan.json --recording run.json</code> sets it beside the plan</p>"
        )
        return
    yield "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in remarks(plan, recording)) + "</ul>"
    yield _lines("totals", "", totals(plan, recording), search="")
    if recording.peak is not None:
        yield chart("held", "bytes held over one step, measured and predicted", lambda: draw_held(plan, recording))
    modules = by_module(plan, recording)
    if modules:
        yield "<h3>By module, forward and backward</h3>"
        yield _lines("measured", "module", modules, search="search measured modules")


def _lines(name: str, first: str, lines: Sequence[Line], *, search: str) -> str:
    rows = []
    for line in lines:
        predicted, measured, ratio = line.texts
        label = line.name + (f" ×{line.copies}" if line.copies > 1 else "")
        rows.append((label, (line.predicted or 0.0, predicted), (line.measured, measured), (line.ratio or 0.0, ratio)))
    return data_table(name, (first, "predicted", "measured", "measured / predicted"), rows, search=search)


def gantt_parts(plan: Plan, recording: Recording | None) -> Iterator[str]:
    """When each rank computes which microbatch: predicted, and measured if a run was recorded."""
    assert plan.pipeline is not None
    title = f"{plan.pipeline.schedule}, predicted"
    yield chart("gantt", "what each rank computes over time, predicted", lambda: draw_gantt(planned_bars(plan), title))
    bars = measured_bars(recording) if recording is not None else ()
    if bars:
        yield chart("gantt-measured", "what each rank computed over time", lambda: draw_gantt(bars, "measured"))


def expert_parts(recording: Recording) -> Iterator[str]:
    """The loads of all layers of experts, and a chart of the least even one."""
    rows = expert_rows(recording)
    columns = (
        "layer",
        "tokens",
        "most chosen",
        "its load over the mean",
        "groups of ranks",
        "the fullest over the mean",
    )
    yield data_table("experts", columns, rows)
    worst = least_even(recording)
    yield chart("experts", f"tokens by expert of {worst}", lambda: draw_experts(recording, worst))
