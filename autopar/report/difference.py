"""What two plans decide differently, folded over repeated layers, and its cost: time, bytes, collectives, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from autopar.folding import fold_keys
from autopar.report.figures import NOISE_S, bytes_text, seconds_text, signed
from autopar.report.pictures import communication_of

if TYPE_CHECKING:
    from autopar.plan import Plan, PlanEntry


def diff_plans(left: Plan, right: Plan) -> str:
    """Totals of both, collectives and memory where they differ, then the folded entries that differ."""
    lines = [*_totals(left, right), *_collectives(left, right), *_memory(left, right)]
    ours, theirs = ({entry.key: entry for entry in plan.every_entry} for plan in (left, right))
    shared = [key for key in ours if key in theirs]
    changed = {
        key: (ours[key].signature(), theirs[key].signature(), ours[key].costs.prices, theirs[key].costs.prices)
        for key in shared
        if ours[key].signature() != theirs[key].signature()
    }
    decisions = [
        _decision(text, [(ours[key], theirs[key]) for key in keys]) for text, keys in fold_keys(changed).items()
    ]
    only = {key: key in ours for key in sorted(ours.keys() ^ theirs.keys())}
    decisions += [
        f"  {text}: only in the {'first' if only[keys[0]] else 'second'}" for text, keys in fold_keys(only).items()
    ]
    return "\n".join([*lines, *(decisions or ["  the decisions are the same"])])


def _totals(left: Plan, right: Plan) -> Iterator[str]:
    yield (
        f"step {seconds_text(left.step_s)} -> {seconds_text(right.step_s)}{_percent(left.step_s, right.step_s)}, "
        f"peak {bytes_text(left.peak_bytes)} -> {bytes_text(right.peak_bytes)}"
        f"{_percent(left.peak_bytes, right.peak_bytes)}"
    )
    ops = [sum(entry.seconds for entry in plan.every_entry) for plan in (left, right)]
    yield (
        f"  ops {seconds_text(ops[0])} -> {seconds_text(ops[1])}, communication (hidden or not) "
        f"{seconds_text(left.communication_s)} -> {seconds_text(right.communication_s)}, recomputation "
        f"{seconds_text(left.recompute_s)} -> {seconds_text(right.recompute_s)}"
    )
    for name, ours, theirs in (
        ("mesh", left.mesh_shape, right.mesh_shape), ("hardware", left.hardware, right.hardware),
        ("model or shapes", left.model_hash, right.model_hash), ("optimizer", left.optimizer, right.optimizer),
        ("stages", _stages(left), _stages(right)), ("memory limit", left.memory_limit_bytes, right.memory_limit_bytes),
    ):  # fmt: skip
        if ours != theirs:
            yield f"  {name}: {ours} -> {theirs}"


def _stages(plan: Plan) -> str:
    """`2 from the first op, 2/addmm#0; 1f1b, 4 microbatches`."""
    if plan.pipeline is None:
        return "none"
    starts = ", ".join(stage.starts or "the first op" for stage in plan.stages)
    return f"{len(plan.stages)} from {starts}; {plan.pipeline.schedule}, {plan.pipeline.microbatches} microbatches"


def _percent(before: float, after: float) -> str:
    return f" ({after / before - 1:+.1%})" if before and after != before else ""


def _collectives(left: Plan, right: Plan) -> Iterator[str]:
    ours, theirs = communication_of(left), communication_of(right)
    for collective, axis in dict.fromkeys((*ours, *theirs)):
        before, after = (plan.get((collective, axis), (0, 0, 0.0)) for plan in (ours, theirs))
        if before != after:
            sides = [
                f"{number} of {bytes_text(bytes_)} in {seconds_text(seconds)}"
                for number, bytes_, seconds in (before, after)
            ]
            yield f"  {collective} over {axis}: {sides[0]} -> {sides[1]}"


def _memory(left: Plan, right: Plan) -> Iterator[str]:
    if left.memory and right.memory:
        yield from _by_kind("at the peak", left.memory, right.memory)
    yield from _by_kind("on the host", _host_memory(left), _host_memory(right))


def _host_memory(plan: Plan) -> Mapping[str, int]:
    """By kind, where that is known."""
    return plan.host_memory or {"in all": plan.host_bytes}


def _by_kind(place: str, left: Mapping[str, int], right: Mapping[str, int]) -> Iterator[str]:
    changed = [
        f"{kind.replace('_', ' ')} {bytes_text(left.get(kind, 0))} -> {bytes_text(right.get(kind, 0))}"
        for kind in dict.fromkeys((*left, *right))
        if left.get(kind, 0) != right.get(kind, 0)
    ]
    if changed:
        yield f"  {place}: {', '.join(changed)}"


def _decision(text: str, pairs: list[tuple[PlanEntry, PlanEntry]]) -> str:
    ours, theirs = pairs[0]
    sides = [" ".join(entry.signature()[1:]) for entry in (ours, theirs)]
    seconds = sum(new.total_s - old.total_s for old, new in pairs)
    bytes_ = sum(new.bytes - old.bytes for old, new in pairs)
    parts = [
        signed(seconds_text, seconds) if abs(seconds) >= NOISE_S else "",
        signed(bytes_text, bytes_) if bytes_ else "",
    ]
    costs = ", ".join(part for part in parts if part)
    return f"  {text}: {sides[0]}  =>  {sides[1]}" + (f"  ({costs})" if costs else "")
