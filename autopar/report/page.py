"""A plan as one self-contained HTML page: no network, readable without its script, on a phone, dark and light."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import chain
from typing import TYPE_CHECKING

from autopar.folding import fold_keys
from autopar.report.figures import bytes_text, host_text, mesh_text, peak_text, seconds_text
from autopar.report.measured import check_recording
from autopar.report.page_measured import expert_parts, gantt_parts, measured_parts
from autopar.report.page_parts import NOT_FOUND, SCRIPT, STYLE, chart, data_table
from autopar.report.pictures import communication_of, plot_plan
from autopar.report.text import collectives_text, modules_of, remarks
from autopar.sharding.layout import format_layout

if TYPE_CHECKING:
    from autopar.plan import Plan, PlanEntry
    from autopar.recording import Recording

TENSORS = 40
Section = tuple[str, str, Iterable[str]]  # name, title, parts


def report_page(plan: Plan, recording: Recording | None = None) -> str:
    """The page. Charts need matplotlib; what the plan does not know is said. Of a pipeline, stage by stage.

    `recording`: of a run of this very plan, set beside what was predicted. Raises RecordingError for another's.
    """
    if recording is not None:
        check_recording(plan, recording)
    sections = _sections(plan) if plan.pipeline is None else _stage_sections(plan, recording)
    at = 1 if recording is not None else len(sections)
    sections[at:at] = [("measured", "Measured", measured_parts(plan, recording))]
    if recording is not None and recording.expert_load:
        sections[2:2] = [("experts", "Load of the experts", expert_parts(recording))]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections)
    body = "".join(
        f'<section id="{name}"><h2>{title}</h2>{"".join(parts)}</section>' for name, title, parts in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>autopar plan {escape(plan.hash)}</title><style>{STYLE}</style></head><body>"
        f"<header><h1>autopar plan <code>{escape(plan.hash)}</code></h1><nav>{links}</nav></header>"
        f"<main>{body}</main><script>{SCRIPT}</script></body></html>\n"
    )


def _sections(plan: Plan) -> list[Section]:
    return [
        ("summary", "Summary", _summary(plan)),
        ("modules", "Modules", _modules(plan)),
        ("memory", "Memory over time", _memory(plan)),
        ("communication", "Communication", _communication(plan)),
        ("step", "One step", _step(plan)),
        ("frontier", "Time and memory", _frontier(plan)),
        ("decisions", "Decisions", _decisions(plan)),
        ("code", "Emitted code", _code(plan)),
    ]


def _stage_sections(plan: Plan, recording: Recording | None) -> list[Section]:
    """The stages, then what each decides for one microbatch."""
    parts = [(stage.number, stage.plan) for stage in plan.stages]
    return [
        ("summary", "Summary", _summary(plan)),
        ("schedule", "Schedule", gantt_parts(plan, recording)),
        ("stages", "Stages", _stages(plan)),
        ("communication", "Communication of one microbatch", _communication(plan)),
        *((f"stage{number}", f"Stage {number}", chain(_modules(own), _decisions(own))) for number, own in parts),
    ]


def _summary(plan: Plan) -> Iterator[str]:
    facts = [
        ("step, predicted", seconds_text(plan.step_s) if plan.step_s else "not priced: the file was edited"),
        ("communication in it, hidden or not", seconds_text(plan.communication_s)),
        ("recomputation in it", seconds_text(plan.recompute_s)),
        ("peak memory", peak_text(plan)),
        *([("beside it", host_text(plan))] if plan.host_bytes else []),
        ("mesh", mesh_text(plan)),
        ("hardware", plan.hardware),
        ("search", plan.search),
        ("at most above the best possible", f"{plan.gap:.1%}" if plan.bound > 0 else "not proven"),
        ("optimizer", plan.optimizer),
    ]
    yield (
        "<dl>"
        + "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
        + "</dl>"
    )
    if len(plan.alternatives) > 1:
        rows = sorted(plan.alternatives.items(), key=lambda item: item[1])
        yield data_table("plans compared", ("plan", "step"), [(name, (s, seconds_text(s))) for name, s in rows])
    said = remarks(plan)
    if said:
        yield "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in said) + "</ul>"


def _modules(plan: Plan) -> Iterator[str]:
    yield (
        "<p>Repeated layers are one row. A layout has one placement per mesh axis: S0 shards dim 0, R replicates, "
        "P is a partial sum.</p>"
    )
    rows: list[Sequence[object]] = []
    for label, entries, copies in modules_of(plan):
        parameters = [entry for entry in entries if entry.kind == "parameter"]
        seconds = copies * sum(entry.total_s for entry in entries)
        held = copies * sum(entry.bytes for entry in parameters)
        layouts = ", ".join(f"{entry.key.rpartition('.')[2]} {format_layout(entry.outputs[0])}" for entry in parameters)
        moves = collectives_text(move for entry in entries for move in entry.moves).replace("\n", ", ")
        rows.append((label, copies, layouts, moves, (seconds, seconds_text(seconds)), (held, bytes_text(held))))
    columns = ("module", "copies", "parameters", "collectives of one copy", "time", "held")
    yield data_table("modules", columns, rows, search="search modules")


def _stages(plan: Plan) -> Iterator[str]:
    assert plan.pipeline is not None
    yield (
        f"<p>{len(plan.stages)} stages along {escape(plan.axis_names[plan.pipeline.axis])}, "
        f"{plan.pipeline.microbatches} microbatches.</p>"
    )
    rows: list[Sequence[object]] = []
    for stage in plan.stages:
        backward = stage.backward_input_s + stage.backward_weight_s
        held, sent, peak = stage.activation_bytes, stage.sent_bytes, stage.plan.peak_bytes
        rows.append(
            (stage.number, stage.rank, stage.starts or "the first op", (stage.forward_s, seconds_text(stage.forward_s)),
             (backward, seconds_text(backward)), stage.in_flight, (held, bytes_text(held)), (sent, bytes_text(sent)),
             (peak, bytes_text(peak)))
        )  # fmt: skip
    columns = ("stage", "rank", "begins at", "forward", "backward", "in flight", "saved each", "sent", "one microbatch")
    yield data_table("stages", columns, rows)


def _chart(plan: Plan, kind: str, label: str) -> str:
    return chart(kind, label, lambda: plot_plan(plan, kind))


def _memory(plan: Plan) -> Iterator[str]:
    timeline = plan.details.timeline if plan.details else None
    if timeline is None:
        yield f'<p class="missing">{NOT_FOUND}give the plan to make_plan with plan=, and save it</p>'
        return
    yield _chart(plan, "memory", "bytes alive against op index, by kind")
    yield f"<p>Peak {bytes_text(max(timeline.totals))} {escape(timeline.peak_text)}.</p>"
    kinds = [(kind, now, max(timeline.bytes_by_kind[kind])) for kind, now in timeline.peak_by_kind.items()]
    rows = [(kind.replace("_", " "), (now, bytes_text(now)), (most, bytes_text(most))) for kind, now, most in kinds]
    yield data_table("kinds", ("kind", "at the peak", "at most"), rows)
    tensors = [
        (it.name, it.kind.replace("_", " "), (it.bytes, bytes_text(it.bytes)), it.where)
        for it in timeline.alive[:TENSORS]
    ]
    yield "<h3>Tensors alive at the peak</h3>"
    yield data_table("alive", ("tensor", "kind", "bytes", "your line"), tensors, search="search tensors")


def _communication(plan: Plan) -> Iterator[str]:
    totals = communication_of(plan)
    if not totals:
        yield "<p>No tensor is moved between layouts.</p>"
        return
    yield _chart(plan, "communication", "milliseconds by collective and mesh axis")
    rows = [
        (collective, axis, number, (bytes_, bytes_text(bytes_)), (seconds, seconds_text(seconds)))
        for (collective, axis), (number, bytes_, seconds) in totals.items()
    ]
    yield data_table("moves", ("collective", "axis", "how many", "bytes", "time, hidden or not"), rows)


def _step(plan: Plan) -> Iterator[str]:
    if plan.step_ops is None:
        yield f'<p class="missing">{NOT_FOUND}<code>autopar report plan.json --model ...</code> simulates the step</p>'
        return
    yield _chart(plan, "step", "what computes and what communicates, over time")
    yield f"<pre>{escape(str(plan.simulate()))}</pre>"


def _frontier(plan: Plan) -> Iterator[str]:
    if "frontier" not in plan.__dict__:
        yield (
            f'<p class="missing">{NOT_FOUND}<code>autopar plan ... --frontier -o plan.json</code> saves '
            "what less memory costs</p>"
        )
        return
    yield _chart(plan, "frontier", "seconds against bytes of the best plans under ever tighter limits")
    rows = [((bytes_, bytes_text(bytes_)), (seconds, seconds_text(seconds))) for bytes_, seconds in plan.frontier]
    yield data_table("points", ("memory", "step"), rows)


def _decisions(plan: Plan) -> Iterator[str]:
    by_key = {entry.key: entry for entry in plan.entries}
    rows: list[Sequence[object]] = []
    for text, members in fold_keys({entry.key: entry.signature() for entry in plan.entries}).items():
        entries = [by_key[key] for key in members]
        rows.append(_decision(text, entries))
    columns = ("decision", "layouts", "residency", "time", "held", "your line")
    yield "<details><summary>every decision, repeated layers in one row</summary>"
    yield data_table("decisions", columns, rows, search="search decisions")
    yield "</details>"


def _decision(text: str, entries: Sequence[PlanEntry]) -> Sequence[object]:
    seconds, held = sum(entry.total_s for entry in entries), sum(entry.bytes for entry in entries)
    first = entries[0]
    return text, first.words, first.residency, (seconds, seconds_text(seconds)), (held, bytes_text(held)), first.where


def _code(plan: Plan) -> Iterable[str]:
    code = plan.details.code if plan.details else {}
    if not code:
        return [f'<p class="missing">{NOT_FOUND}give the plan to make_plan with plan=, and save it</p>']
    return [
        f"<details><summary>{escape(phase)}, {len(text.splitlines())} lines</summary>"
        f"<pre><code>{escape(text)}</code></pre></details>"
        for phase, text in code.items()
    ]
