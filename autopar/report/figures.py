"""Numbers, tables and what every text of a plan begins with."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from autopar.plan import Plan

WIDTH = 118
NOT_PRICED = "not priced: give it to make_plan with plan=, which prices it for a model"
NOISE_S = 1e-9  # a difference that is not told


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


def signed(text: Callable[[float], str], value: float) -> str:
    """A difference: `+1.23 ms`, `-1.23 GB`."""
    return ("-" if value < 0 else "+") + text(abs(value))


def mesh_text(plan: Plan) -> str:
    """`dp=2 x tp=4`."""
    return " x ".join(f"{name}={size}" for name, size in zip(plan.axis_names, plan.mesh_shape, strict=True))


def title_text(plan: Plan) -> str:
    """What plan it is, for which mesh."""
    return f"autopar plan {plan.hash}: search {plan.search}, mesh {mesh_text(plan)}, hardware {plan.hardware}"


def peak_text(plan: Plan) -> str:
    """`1.2 GB per rank of 73.6 GB allowed`."""
    limit = f" of {bytes_text(plan.memory_limit_bytes)} allowed" if plan.memory_limit_bytes else ""
    return f"{bytes_text(plan.peak_bytes)} per rank{limit}"


def kinds_text(memory: Mapping[str, int]) -> str:
    """`parameter 1.2 GB, gradient 600 MB`: bytes by kind, the most first."""
    ranked = sorted(memory.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {bytes_text(bytes_)}" for kind, bytes_ in ranked if bytes_)


def host_text(plan: Plan) -> str:
    """`2.4 GB on the host (parameter 1.2 GB, ...)`; nothing where nothing lies there."""
    if not plan.host_bytes:
        return ""
    kinds = f" ({kinds_text(plan.host_memory)})" if plan.host_memory else ""
    return f"{bytes_text(plan.host_bytes)} on the host{kinds}"


def rendered(*parts: object) -> str:
    """Texts and tables, one below the other."""
    file = io.StringIO()
    console = Console(file=file, width=WIDTH, color_system=None, highlight=False)
    for part in parts:
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
