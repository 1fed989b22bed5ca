"""Bubble rates of zero_bubble.csv from its own T_F, T_B, T_W and T_comm: no constant is fitted.

The closed formulas' terms in T_comm were inferred from this table, so their rows check only that inference.

1F1B, ZB-H1 and ZB-H2 by closed formula, interleaved 1F1B and ZB-2p by simulating their action lists. The first and
last stage hold one block less than the others, so the chunks of a rank are (layers + 2) / ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from autopar.cost_models.pipeline import StageTimes, bubble_rate, closed_step_seconds
from autopar.schedules.list_scheduling import ZeroBubbleMemory, zero_bubble
from autopar.schedules.synchronous import interleaved, one_forward_one_backward
from autopar.schedules.timing import longest_rank_seconds, simulate_schedule
from benchmarks.published_tables.comparison import Claim, Row, Table, judged, read_rows

FILE = "zero_bubble.csv"
COLUMNS = ("model", "schedule", "stages_p", "m", "bubble_rate", "T_F_ms", "T_B_ms", "T_W_ms", "T_comm_ms")
SCHEDULES = ("1F1B", "1F1B simulated", "1F1B-I", "ZB-H1", "ZB-H2", "ZB-2p")


def compare(folder: Path) -> Iterator[Table]:
    """The bubble rates of every row of the five schedules."""
    if not (folder / FILE).is_file():
        return
    made: dict[str, list[Row]] = {name: [] for name in SCHEDULES}
    path = folder / FILE
    for row in read_rows(path, COLUMNS):
        label = f"{row['model']} p={row['stages_p']} m={row['m']} {row['schedule']}"
        simulated = ("1F1B simulated",) if row["schedule"] == "1F1B" else ()
        for name in (row["schedule"], *simulated):
            if name in made:
                published, predicted = judged(path, row, partial(_both, row, name))
                made[name].append(Row(label, published, predicted))
    claims = tuple(
        Claim(f"bubble rate, {name}", "worst difference", _worst_difference(rows), 0.01, len(rows))
        for name, rows in made.items()
        if rows
    )
    yield Table("zero-bubble paper's bubble rates", tuple(row for rows in made.values() for row in rows), claims)


def _worst_difference(rows: list[Row]) -> float:
    return max(abs(row.predicted - row.measured) for row in rows)


def _both(row: dict[str, str], schedule: str) -> tuple[float, float]:
    return float(row["bubble_rate"]), _rate(row, schedule)


def _rate(row: dict[str, str], schedule: str) -> float:
    ranks, microbatches = int(row["stages_p"]), int(row["m"])
    times = StageTimes(*(1e-3 * float(row[name]) for name in ("T_F_ms", "T_B_ms", "T_W_ms", "T_comm_ms")))
    closed = {"1F1B": "1f1b", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2"}
    if schedule in closed:
        step_s = closed_step_seconds(closed[schedule], ranks, microbatches, times)
        return bubble_rate(step_s, microbatches, times)
    if schedule == "1F1B simulated":
        actions = one_forward_one_backward(ranks, microbatches)
    elif schedule == "1F1B-I":
        actions = interleaved(ranks, microbatches, (int(row["layers"]) + 2) // ranks)
    else:
        share = 32 / (34 + 5 * int(row["heads"]) * int(row["seq"]) / int(row["hidden"]))  # Qi et al., section 3.1
        actions = zero_bubble(ranks, microbatches, times, ZeroBubbleMemory(2 * ranks, share))
    return bubble_rate(longest_rank_seconds(simulate_schedule(actions, times)), microbatches, times)
