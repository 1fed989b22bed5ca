"""Memory over time as text: bytes by kind, where the peak is, and the tensors that are alive then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.report.figures import bytes_text
from autopar.report.pictures import timeline_of

if TYPE_CHECKING:
    from autopar.plan import Plan
    from autopar.plan_details import MemoryTimeline

COLUMNS, ROWS, TENSORS = 72, 8, 15


def memory_text(plan: Plan) -> str:
    """A drawing in characters, the kinds at the peak, and the largest tensors alive then with the user's lines."""
    timeline = timeline_of(plan)
    lines = ["memory of the fullest rank over one step, forward then backward:", *_drawing(timeline)]
    lines.append(f"peak {bytes_text(max(timeline.totals))} {timeline.peak_text}")
    kinds = sorted(((bytes_, kind) for kind, bytes_ in timeline.peak_by_kind.items() if bytes_), reverse=True)
    lines.append("  " + ", ".join(f"{kind.replace('_', ' ')} {bytes_text(bytes_)}" for bytes_, kind in kinds))
    if timeline.limit_bytes:
        margin = f", and {bytes_text(timeline.margin_bytes)} of the device beyond it" if timeline.margin_bytes else ""
        lines.append(f"  of {bytes_text(timeline.limit_bytes)} allowed{margin}")
    lines.append("largest tensors alive then:")
    lines += [
        f"  {bytes_text(tensor.bytes):>9}  {tensor.kind.replace('_', ' '):<15}  {tensor.name}"
        + (f"  ({tensor.where})" if tensor.where else "")
        for tensor in timeline.alive[:TENSORS]
    ]
    rest = timeline.alive[TENSORS:]
    if rest:
        lines.append(f"  {bytes_text(sum(tensor.bytes for tensor in rest)):>9}  in {len(rest)} smaller ones")
    return "\n".join(lines)


def _drawing(timeline: MemoryTimeline) -> list[str]:
    """Bars of the most bytes in each stretch of ops."""
    columns = min(COLUMNS, timeline.ops)
    heights = [0] * columns
    for index, total in zip(timeline.index, timeline.totals, strict=True):
        place = index * columns // timeline.ops
        heights[place] = max(heights[place], total)
    top = max(heights) or 1
    rows = []
    for row in range(ROWS, 0, -1):
        bars = "".join("#" if height >= top * (row - 0.5) / ROWS else " " for height in heights)
        label = bytes_text(top * row / ROWS) if row in (ROWS, ROWS // 2) else ""
        rows.append(f"{label:>9} |{bars.rstrip()}")
    start = timeline.backward_start * columns // timeline.ops
    rows.append(f"{'':>9} +{'-' * start}{'^ backward' if start < columns - 9 else '^'}")
    return rows
