"""What each byte less costs: the frontier of a plan as a table, and as a picture (SVG)."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.report.text import bytes_text, seconds_text

WIDTH, HEIGHT, MARGIN = 640, 400, 70
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


def frontier_svg(points: Points) -> str:
    """The same as a picture: bytes to the right, seconds upwards, both from zero; a point's title says its numbers."""
    most = max((bytes_ for bytes_, _ in points), default=1) or 1
    longest = max((seconds for _, seconds in points), default=1.0) or 1.0
    places = [
        (MARGIN + (WIDTH - 2 * MARGIN) * bytes_ / most, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * seconds / longest)
        for bytes_, seconds in points
    ]
    steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    bottom, right = HEIGHT - MARGIN, WIDTH - MARGIN
    dots = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{bytes_text(bytes_)}, {seconds_text(seconds)}</title></circle>'
        for (x, y), (bytes_, seconds) in zip(places, points, strict=True)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="13">',
            f'<path d="M{MARGIN},{MARGIN} V{bottom} H{right}" fill="none" stroke="black"/>',
            f'<polyline points="{steps}" fill="none" stroke="steelblue" stroke-width="2"/>',
            *dots,
            _text(right, bottom + 20, "end", bytes_text(most)),
            _text(MARGIN - 8, MARGIN + 4, "end", seconds_text(longest)),
            _text((MARGIN + right) // 2, bottom + 40, "middle", "bytes at the peak of one rank"),
            _text(MARGIN, MARGIN - 20, "start", "seconds of one step"),
            "</svg>",
        ]
    )


def _text(x: int, y: int, anchor: str, text: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'
