"""A plan with stages as text: where each begins, what it costs, what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from autopar.report.figures import NOT_PRICED, bytes_text, host_text, peak_text, rendered, seconds_text, title_text

if TYPE_CHECKING:
    from autopar.plan import Plan, StagePlan

COLUMNS = (
    "stage", "rank", "begins at", "parameters", "forward", "backward", "in flight", "saved each", "sent",
    "one microbatch",
)  # fmt: skip


def stages_text(plan: Plan) -> str:
    """Totals, then a line per stage."""
    return rendered(_headline(plan), _table(plan), *(f"note: {note}" for note in plan.notes))


def _headline(plan: Plan) -> str:
    assert plan.pipeline is not None
    pipeline = plan.pipeline
    per_rank = f", {pipeline.virtual_stages} of them on each rank" if pipeline.virtual_stages > 1 else ""
    head = (
        f"{title_text(plan)}\n"
        f"{len(plan.stages)} stages along {plan.axis_names[pipeline.axis]!r}{per_rank}; schedule {pipeline.schedule}, "
        f"{pipeline.microbatches} microbatches\n"
    )
    if not plan.step_s:
        return f"{head}{NOT_PRICED}"
    host = f"\n{host_text(plan)}" if plan.host_bytes else ""
    return (
        f"{head}predicted step {seconds_text(plan.step_s)}, bubble {pipeline.bubble:.1%} of it; "
        f"peak memory {peak_text(plan)}{host}"
    )


def _table(plan: Plan) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "begins at" else "right", overflow="fold")
    for stage in plan.stages:
        table.add_row(*_cells(stage))
    return table


def _cells(stage: StagePlan) -> tuple[str, ...]:
    held = stage.plan.memory.get("parameter", 0)
    return (
        str(stage.number),
        str(stage.rank),
        stage.starts or "the first op",
        bytes_text(held),
        seconds_text(stage.forward_s),
        seconds_text(stage.backward_input_s + stage.backward_weight_s),
        str(stage.in_flight),
        bytes_text(stage.activation_bytes),
        bytes_text(stage.sent_bytes),
        bytes_text(stage.plan.peak_bytes),
    )
