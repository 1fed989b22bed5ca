"""A live line for a running search: seconds, incumbent, bound and gap."""

from __future__ import annotations

import math
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text


class ProgressLine:
    """Context manager and observer: `with ProgressLine(console) as line: solve(problem, observer=line)`."""

    def __init__(self, console: Console) -> None:
        self._live = Live(Text("reducing"), console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> ProgressLine:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def __call__(self, seconds: float, cost: float, bound: float) -> None:
        """Show one improvement."""
        self._live.update(Text(progress_text(seconds, cost, bound)))


def progress_text(seconds: float, cost: float, bound: float) -> str:
    """`12.3 s  incumbent 100  bound 99  gap 1.00 %`, with a dash for what is not known yet."""
    return f"{seconds:7.1f} s  incumbent {number(cost)}  bound {number(bound)}  gap {percent(cost, bound)}"


def number(value: float) -> str:
    """All digits of a whole number, nine significant ones of another; a dash for an infinite one."""
    if not math.isfinite(value):
        return "-"
    return f"{int(value):,}" if value.is_integer() and abs(value) < 2**53 else f"{value:.9g}"


def percent(cost: float, bound: float) -> str:
    """The relative gap in per cent."""
    if cost == bound:
        return "0 %"
    if not (math.isfinite(cost) and math.isfinite(bound)) or cost == 0:
        return "-"
    return f"{100 * (cost - bound) / abs(cost):.2f} %"
