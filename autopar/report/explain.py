"""One decision after the other in plain words: what was chosen, why, what else there was, and the formulas."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import TYPE_CHECKING

from autopar.report.figures import NOISE_S, bytes_text, host_text, seconds_text, signed
from autopar.sharding.layout import format_layout

if TYPE_CHECKING:
    from autopar.plan import Plan
    from autopar.plan_questions import Alternative, Explanation

RULED_OUT_SHOWN = 6
_UNTOLD = "not told why: that needs the model; name it with --model in a shell, or ask what make_plan gives"


def explanations_text(plan: Plan, pattern: str, found: tuple[Explanation, ...], stages: Sequence[str] = ()) -> str:
    """`stages`, as `stages_text` gives them; one paragraph per folded entry that matches; of a pipeline, stage by
    stage."""
    if not found and not stages:
        return f"nothing in the plan matches {pattern!r}{_near(plan, pattern)}"
    lines = list(stages)
    for stage, items in groupby(found, key=lambda item: item.stage):
        own = plan if stage is None else plan.stages[stage].plan
        lines += [] if stage is None else [f"stage {stage}, one microbatch:"]
        lines += [line for item in items for line in _paragraph(own, item)]
    return "\n".join([*lines, *_missing(found)])


def _near(plan: Plan, pattern: str) -> str:
    """Names that are like it, and what else may be meant."""
    entries = [*plan.entries, *(entry for stage in plan.stages for entry in stage.plan.entries)]
    names = dict.fromkeys(name for entry in entries for name in (entry.key, entry.module) if name)
    near = get_close_matches(pattern, names, n=3)
    told = f"; near it: {', '.join(near)}" if near else ""
    return f"{told}; a weight of two names (tied) has the first of model.named_parameters(), buffers are not planned"


def stages_text(plan: Plan, pattern: str) -> list[str]:
    """Of a pipeline: where each stage that the pattern names begins and why, and why its schedule."""
    if plan.pipeline is None:
        return []
    lines: list[str] = []
    if fnmatch.fnmatchcase("schedule", pattern):
        lines.append(f"schedule: {plan.pipeline.schedule}, {plan.pipeline.microbatches} microbatches")
        lines.append(f"  {plan.cutting.why_schedule() if plan.cutting is not None else _UNTOLD}")
    for stage in plan.stages:
        if not fnmatch.fnmatchcase(f"stage {stage.number}", pattern):
            continue
        where = f"before `{stage.starts}`" if stage.number else "with the inputs"
        busy_s = stage.forward_s + stage.backward_input_s + stage.backward_weight_s
        lines.append(
            f"stage {stage.number}: begins {where}, on rank {stage.rank} of its axis; {seconds_text(busy_s)} and "
            f"{bytes_text(stage.sent_bytes)} sent for a microbatch, {stage.in_flight} in flight at most"
        )
        if stage.number:
            lines.append(f"  {plan.cutting.why_cut(stage.number) if plan.cutting is not None else _UNTOLD}")
    return lines


def _missing(found: tuple[Explanation, ...]) -> Iterator[str]:
    """What could not be told, and of which decisions if not of all."""
    by_reason: dict[str, list[str]] = {}
    for item in found:
        if item.missing:
            by_reason.setdefault(item.missing, []).append(item.name)
    for reason, names in by_reason.items():
        several = "" if len(names) == len(found) else f" of {', '.join(names)}"
        yield f"not told{several}: {reason}"


def _paragraph(plan: Plan, item: Explanation) -> Iterator[str]:
    entry = item.entry
    reads, writes = (" ".join(map(format_layout, layouts)) for layouts in (entry.inputs, entry.outputs))
    yield f"{item.name}: " + (f"reads {reads}, gives {writes}" if entry.kind == "op" else f"is laid out {writes}")
    yield f"  {seconds_text(entry.seconds)} each, {bytes_text(entry.bytes)} on the largest rank"
    for move in entry.moves:
        yield (
            f"  {'its gradient' if entry.kind == 'parameter' else 'before it'}: {move.collective} over axis "
            f"{plan.axis_names[move.axis]}, {bytes_text(move.bytes)}, {seconds_text(move.seconds)}"
        )
    if entry.kind == "parameter" and entry.residency == "offload":
        yield "  it lies on the host, with its gradient and optimizer state, and is copied to the device to be read"
        if plan.host_bytes:
            yield f"  in all, {host_text(plan)}"
    elif entry.residency == "recompute":
        yield "  its value is recomputed in the backward"
    elif entry.residency not in ("", "keep"):
        yield f"  its value has the residency {entry.residency} from the forward to the backward"
    elif entry.residency == "keep":
        yield f"  its {'gathered copy' if entry.kind == 'parameter' else 'value'} is kept for the backward"
    if entry.where:
        yield f"  from {entry.where}"
    yield from (f"  {answer}" for answer in item.answers)
    if item.alternatives:
        yield "  what else there was, everything else chosen anew for it, memory aside:"
        yield from (f"    {_alternative(choice)}" for choice in item.alternatives)
    if item.unsolved:
        yield f"    allowed too, not solved for: {' '.join(item.unsolved)}"
    yield from _ruled_out(item)
    yield from _formulas(item)


def _alternative(item: Alternative) -> str:
    if item.is_chosen:
        return f"{item.layout:<12} {seconds_text(item.cost):>9}  chosen"
    parts = [f"{name} {signed(seconds_text, value)}" for name, value in
             (("ops", item.ops_s), ("moves", item.moves_s)) if abs(value) >= NOISE_S]  # fmt: skip
    if item.peak_bytes:
        parts.append(f"memory {signed(bytes_text, item.peak_bytes)}")
    others = f"{item.changes} other decision{'s' if item.changes != 1 else ''} would change"
    return f"{item.layout:<12} {seconds_text(item.cost):>9}  {', '.join([*parts, others])}"


def _ruled_out(item: Explanation) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for ruled in item.ruled_out:
        by_reason.setdefault(ruled.why, []).append(ruled.layout)
    for why, layouts in list(by_reason.items())[:RULED_OUT_SHOWN]:
        yield f"  ruled out: {' '.join(layouts[:RULED_OUT_SHOWN])}{' ...' if layouts[RULED_OUT_SHOWN:] else ''}: {why}"


def _formulas(item: Explanation) -> Iterator[str]:
    for title, texts in (
        ("seconds", item.formulas), ("moves", item.move_formulas), ("memory", item.memory_formulas),
    ):  # fmt: skip
        if texts:
            yield f"  {title}:"
            yield from (f"    {line}" for text in dict.fromkeys(texts) for line in text.splitlines())
