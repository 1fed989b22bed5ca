"""Pictures, drawn by matplotlib, which is installed for whoever wants them."""

from __future__ import annotations

import os
from typing import Any

from autopar.errors import AutoparError, FileWriteError
from autopar.written_files import written_file


def new_figure(width: float, height: float) -> Any:
    """An empty `matplotlib.figure.Figure` of that many inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise AutoparError("a plot needs matplotlib", fix="pip install matplotlib") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: str | os.PathLike[str], *, dpi: int = 120) -> None:
    """Write a picture, PNG or SVG by the name of the file; `dpi`: pixels of an inch. Raises FileWriteError."""
    try:
        with written_file(path) as file:
            figure.savefig(file, dpi=dpi)
    except ValueError as error:  # the file's name asks for a format that there is not
        raise FileWriteError(
            f"the picture cannot be written: {error}", where=os.fspath(path), fix="name it .png or .svg"
        ) from error
