"""What each byte less costs: the frontier of a plan as a table, and as a picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from autopar.plots import new_figure, save_figure
from autopar.report.figures import bytes_text, seconds_text

Points = Sequence[tuple[int, float]]


def frontier_table(points: Points) -> str:
    """One line per point, the roomiest first: bytes, seconds, and the seconds above those of the roomiest."""
    first = points[0][1] if points else 0.0
    lines = [f"{'memory':>10}  {'step':>10}  {'more':>7}"]
    lines += [
        f"{bytes_text(bytes_):>10}  {seconds_text(seconds):>10}  {(seconds / first - 1) if first else 0.0:>7.1%}"
        for bytes_, seconds in points
    ]
    return "\n".join(lines)


def save_frontier(points: Points, path: str | os.PathLike[str]) -> None:
    """The same as a picture, PNG or SVG by the name of the file; needs matplotlib."""
    figure = new_figure(6.4, 4)
    draw_frontier(figure.add_subplot(), points)
    save_figure(figure, path)


def draw_frontier(axes: Any, points: Points) -> None:
    """Onto the axes of a figure."""
    axes.plot([bytes_ / 1e9 for bytes_, _ in points], [1e3 * seconds for _, seconds in points], marker="o")
    axes.set(xlabel="GB at the peak of one rank", ylabel="ms of one step", title="memory and time")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
