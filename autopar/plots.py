"""Pictures, drawn by matplotlib, which is installed for whoever wants them."""

from __future__ import annotations

from typing import Any

from autopar.errors import AutoparError


def new_figure(width: float, height: float) -> Any:
    """An empty `matplotlib.figure.Figure` of that many inches; its `savefig` writes PNG or SVG, by the file's name."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise AutoparError("a plot needs matplotlib", fix="pip install matplotlib") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
