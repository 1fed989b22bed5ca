"""The plan as a table by module, folded over repeated layers, with its totals and remarks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from autopar.folding import fold_keys
from autopar.report.figures import (
    NOT_PRICED,
    bytes_text,
    host_text,
    kinds_text,
    peak_text,
    rendered,
    seconds_text,
    title_text,
)
from autopar.report.stages import stages_text
from autopar.sharding.layout import format_layout

if TYPE_CHECKING:
    from autopar.plan import Plan
    from autopar.plan_details import MoveCost
    from autopar.plan_entries import OpWithoutRule, PlanEntry

RULES_SHOWN = 3


def plan_text(plan: Plan) -> str:
    """Totals, a table by module, the costliest decisions; of a pipeline, its stages."""
    if plan.pipeline is not None:
        return stages_text(plan)
    return rendered(_headline(plan), _module_table(plan), _memory_line(plan), _costliest(plan), *remarks(plan))


def _headline(plan: Plan) -> str:
    known = f", at most {plan.gap:.1%} above the best possible" if plan.bound > 0 else ""
    again = f", recomputation {seconds_text(plan.recompute_s)}" if plan.recompute_s else ""
    if not plan.step_s:
        return f"{title_text(plan)}\n{NOT_PRICED}"
    return (
        f"{title_text(plan)}\npredicted step {seconds_text(plan.step_s)} "
        f"(communication {seconds_text(plan.communication_s)}{again}){known}; "
        f"peak memory {peak_text(plan)}\n"
        f"placements by mesh axis ({', '.join(plan.axis_names)}): S0 shards dim 0, R replicates, P is a partial sum"
    )


def _module_table(plan: Plan) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("module", "parameters", "output", "collectives", "time", "held"):
        table.add_column(name, justify="right" if name in ("time", "held") else "left", overflow="fold")
    for label, entries, copies in modules_of(plan):
        table.add_row(
            label + (f"  x{copies}" if copies > 1 else ""),
            "\n".join(f"{_own_name(entry)} {format_layout(entry.outputs[0])}" for entry in _parameters(entries)),
            _output_layout(entries),
            collectives_text(move for entry in entries for move in entry.moves),
            seconds_text(copies * sum(entry.total_s for entry in entries)),
            bytes_text(sum(entry.bytes for entry in _parameters(entries))),
        )
    return table


def _parameters(entries: Sequence[PlanEntry]) -> list[PlanEntry]:
    return [entry for entry in entries if entry.kind == "parameter"]


def modules_of(plan: Plan) -> list[tuple[str, list[PlanEntry], int]]:
    """(folded module path, entries of its first member, how many members)."""
    by_module: dict[str, list[PlanEntry]] = defaultdict(list)
    for entry in plan.entries:
        by_module[entry.module or ("(inputs)" if entry.kind == "input" else "(model)")].append(entry)
    signatures = {
        module: tuple((_tail(entry), *entry.signature()) for entry in entries) for module, entries in by_module.items()
    }
    return [(text, by_module[members[0]], len(members)) for text, members in fold_keys(signatures).items()]


def _tail(entry: PlanEntry) -> str:
    return entry.key.rpartition("/")[2] if entry.kind == "op" else _own_name(entry)


def _own_name(entry: PlanEntry) -> str:
    return entry.key.rpartition(".")[2]


def _output_layout(entries: Sequence[PlanEntry]) -> str:
    forward = [entry for entry in entries if entry.kind == "op" and ".backward" not in entry.key]
    if forward:
        return format_layout(forward[-1].outputs[0])
    inputs = [entry for entry in entries if entry.kind in ("input", "tangent")]
    return "\n".join(f"{entry.key.partition(':')[2]} {format_layout(entry.outputs[0])}" for entry in inputs)


def collectives_text(moves: Iterable[MoveCost]) -> str:
    """`2 all_reduce axis 1 524 kB`, a line each."""
    totals: dict[tuple[str, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for move in moves:
        if move.collective != "slice":
            number, bytes_ = totals[move.collective, move.axis]
            totals[move.collective, move.axis] = (number + 1, bytes_ + move.bytes)
    return "\n".join(
        f"{number} {collective} axis {axis} {bytes_text(bytes_)}"
        for (collective, axis), (number, bytes_) in totals.items()
    )


def _memory_line(plan: Plan) -> str:
    if not plan.memory:
        return "memory by kind: not measured"
    host = f"\n{host_text(plan)}" if plan.host_bytes else ""
    note = "" if plan.optimizer != "none" else "; no optimizer= was named, so its state is not counted"
    return f"memory at the peak: {kinds_text(plan.memory)}{note}{host}"


def _costliest(plan: Plan) -> str:
    """The three folded decisions that take the most time."""
    by_key = {entry.key: entry for entry in plan.entries}
    totals = []
    for text, members in fold_keys({entry.key: entry.signature() for entry in plan.entries}).items():
        entries = [by_key[key] for key in members]
        total = sum(entry.total_s for entry in entries)
        totals.append((total, text, entries))
    totals.sort(key=lambda item: -item[0])
    lines = ["costliest decisions:"]
    for total, text, entries in totals[:3]:
        moved = sum(move.seconds for entry in entries for move in entry.moves)
        layouts = " ".join(map(format_layout, entries[0].outputs))
        note = f", {seconds_text(moved)} of it moves" if moved else ""
        lines.append(f"  {seconds_text(total)}  {text} -> {layouts}{note}")
    return "\n".join(lines)


def remarks(plan: Plan) -> list[str]:
    """What is not kept for the backward, which plans were compared, which ops have no rule, notes."""
    words = dict.fromkeys(entry.residency for entry in plan.entries if entry.residency not in ("", "keep"))
    lines = [_not_kept(plan, word) for word in sorted(words)]
    if len(plan.alternatives) > 1:
        ranked = sorted(plan.alternatives.items(), key=lambda item: item[1])
        lines.append("plans compared: " + ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in ranked))
    if plan.discovered:
        lines.append("discovered rules: " + "; ".join(map(_discovered, plan.discovered)))
    if plan.replicated:
        lines.append("replicated: " + "; ".join(map(_replicated, plan.replicated)))
    return lines + [f"note: {note}" for note in plan.notes]


def _not_kept(plan: Plan, word: str) -> str:
    entries = {entry.key: entry for entry in plan.entries if entry.residency == word}
    held = bytes_text(sum(entry.bytes for entry in entries.values()))
    names = list(fold_keys(dict.fromkeys(entries, "")))
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    said = {
        "recompute": "recomputed in the backward rather than kept",
        "offload": "on the host where they are not read",
        "compress": "compressed without loss from the forward to the backward",
    }
    return f"{said.get(word, f'{word} from the forward to the backward')} ({held}): {shown}"


def _uses(item: OpWithoutRule) -> str:
    return f"{item.op} ({item.uses} use{'s' if item.uses > 1 else ''}"


def _discovered(item: OpWithoutRule) -> str:
    """`mylib.op.default (2 uses: S0 -> S0 | S1 -> S1)`."""
    more = " | ..." if len(item.rules) > RULES_SHOWN else ""
    return f"{_uses(item)}: {' | '.join(item.rules[:RULES_SHOWN])}{more})"


def _replicated(item: OpWithoutRule) -> str:
    """`mylib.op.default (1 use, model.py:12 in forward: ...; it is random)`."""
    where = f", {item.where}" if item.where else ""
    return f"{_uses(item)}{where}{'; ' + item.why if item.why else ''})"
