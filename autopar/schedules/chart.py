"""A schedule to look at: a text chart, a picture, and a summary of bubbles and memory.

Takes in a schedule and its simulation, predicted, or measured and brought into the same form.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from autopar.cost_models.simulator import Simulation
from autopar.plots import new_figure, save_figure
from autopar.schedules.actions import Schedule
from autopar.schedules.memory import StageMemory, in_flight, peaks
from autopar.schedules.timing import bubble_fraction, longest_rank_seconds

_LETTERS: Mapping[str, str] = MappingProxyType(
    {"forward": "F", "backward": "B", "backward_input": "b", "backward_weight": "w"}
)
_COLORS: Mapping[str, str] = MappingProxyType(
    {"forward": "#4c72b0", "backward": "#55a868", "backward_input": "#8fcf9f", "backward_weight": "#c9b458"}
)
WIDTH = 150  # columns of the text chart, at most


def text_chart(schedule: Schedule, simulation: Simulation, *, width: int = WIDTH) -> str:
    """One line for each rank: what it computes over time. `F`, `B`, `b`, `w` and the microbatch; `.` is a bubble.

    A letter is the action's kind (`b` and `w` are the halves of a backward); a stage in the second half of a rank's
    stages has its microbatch in brackets.
    """
    spans = [(op, float(start), float(end)) for op, start, end in
             zip(simulation.ops, simulation.starts_s, simulation.ends_s, strict=True)
             if op.kind == "compute" and end > start]  # fmt: skip
    shortest_s = min((end - start for _, start, end in spans), default=1.0)
    column_s = max(simulation.step_s / width, shortest_s / 4)
    columns = round(simulation.step_s / column_s)
    lines = [["."] * columns for _ in schedule.ranks]
    for op, start, end in spans:
        kind, _, place = op.name.partition(" ")
        stage, item = place.split(".")
        upper = schedule.virtual_stages > 1 and int(stage) // len(schedule.ranks) % 2 == 1
        first, last = round(start / column_s), max(round(start / column_s) + 1, round(end / column_s))
        label = _LETTERS[kind] + (f"({item})" if upper else item)
        room = last - first
        text = label[:room].ljust(room, "-") if room > 1 else label[0]
        lines[op.rank][first:last] = list(text)
    return "\n".join(f"rank {rank:<3} {''.join(line)[:columns]}" for rank, line in enumerate(lines))


def summary(schedule: Schedule, simulation: Simulation, memory: StageMemory | Mapping[int, StageMemory]) -> str:
    """Times, bubbles, microbatches in flight by stage, and bytes if the stages' are given."""
    lines = [
        f"{schedule.name}: {schedule.stages} stages on {len(schedule.ranks)} ranks, "
        f"{schedule.microbatches} microbatches",
        f"step {simulation.step_s:.6g} s, longest rank {longest_rank_seconds(simulation):.6g} s, "
        f"bubble {100 * bubble_fraction(simulation):.1f} %",
        f"in flight by stage: {' '.join(map(str, in_flight(schedule)))}",
    ]
    most = [peak.bytes for peak in peaks(schedule, memory)]
    if any(most):
        lines.append(f"peak by rank: {' '.join(f'{value:.4g}' for value in most)} bytes")
    return "\n".join(lines)


def save_picture(schedule: Schedule, simulation: Simulation, path: str | Path) -> None:
    """The chart as PNG or SVG: ranks down, time across, kinds by colour; microbatches in flight over it."""
    ranks = len(schedule.ranks)
    figure = new_figure(14, 1.5 + 0.5 * ranks)
    axes = figure.add_subplot()
    spans = zip(simulation.ops, simulation.starts_s.tolist(), simulation.ends_s.tolist(), strict=True)
    for op, start, end in spans:
        kind, _, place = op.name.partition(" ")
        if op.kind != "compute":
            continue
        axes.barh(op.rank, end - start, left=start, color=_COLORS[kind], edgecolor="white", linewidth=0.4)
        if schedule.microbatches * schedule.virtual_stages <= 40:
            axes.text((start + end) / 2, op.rank, place.split(".")[1], ha="center", va="center", fontsize=6)
    axes.invert_yaxis()
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_xlabel("seconds")
    axes.set_title(f"{schedule.name}: bubble {100 * bubble_fraction(simulation):.1f} %")
    used = {op.name.partition(" ")[0] for op in simulation.ops if op.kind == "compute"}
    handles = [axes.barh(0, 0, color=color, label=kind) for kind, color in _COLORS.items() if kind in used]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1))
    save_figure(figure, path)
