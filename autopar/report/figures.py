"""Numbers and tables as text."""

from __future__ import annotations

import io

from rich.console import Console

WIDTH = 118


def seconds_text(seconds: float) -> str:
    """`1.23 ms`."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def bytes_text(bytes_: float) -> str:
    """`1.23 GB`, SI."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if bytes_ >= scale:
            return f"{bytes_ / scale:.3g} {unit}"
    return f"{bytes_:.0f} B"


def rendered(*parts: object) -> str:
    """Texts and tables, one below the other."""
    file = io.StringIO()
    console = Console(file=file, width=WIDTH, color_system=None, highlight=False)
    for part in parts:
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
