"""Experts placed anew over the groups of ranks that hold them: a question to the search; and what copies take."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import MemoryLimitError
from autopar.passes.expert_places import Groups
from autopar.passes.pipeline import LocalProgram
from autopar.plan import Plan
from autopar.planner.liveness import Timeline, predicted_timeline
from autopar.search.experts.owners import choose_owners
from autopar.search.experts.place import place_experts


def place_anew(
    load: Sequence[Sequence[float]],
    current: Sequence[Groups],
    owned: Sequence[Groups],
    *,
    replicas: int | None,
    move_cost: float,
    time_limit_s: float,
) -> list[tuple[Groups, Groups]]:
    """By layer, which experts each group of ranks is to compute, `replicas` in all, and which of all it is to own.

    `load`: [layers, experts]. `current` and `owned`: what each group computes and owns now. `move_cost`: the load that
    an expert must take off the slowest group to be moved. Raises ExpertPlacementError where replicas do not divide.
    """
    placement = place_experts(
        load,
        (len(current[0]),),
        replicas=replicas,
        current=current,
        move_cost=move_cost,
        time_limit_s=time_limit_s,
    )
    found = []
    for layer, own in zip(placement.assignment, owned, strict=True):
        computed = tuple(tuple(sorted(group)) for group in layer.tolist())
        found.append((computed, tuple(map(tuple, choose_owners(computed, own)))))
    return found


def bytes_of_copies(plan: Plan, planned: LocalProgram, copied: LocalProgram) -> int:
    """By how much copies of experts raise what a rank holds at most; MemoryLimitError beyond the plan's limit.

    In a pipeline a rank holds other microbatches beside, more or fewer of them in a forward than in a backward: there
    the phase counts whose peak rises more, and the rank that was fullest.
    """
    before, after = predicted_timeline(planned), predicted_timeline(copied)
    if plan.pipeline is None:
        more = after.peak_bytes - before.peak_bytes
    else:
        more = max(late - early for early, late in zip(_phase_peaks(before), _phase_peaks(after), strict=True))
    limit = plan.memory_limit_bytes
    if limit is not None and plan.peak_bytes + more > limit:
        raise MemoryLimitError(
            f"copies of experts take {more:,} bytes more than the {plan.peak_bytes:,} planned, and the limit is "
            f"{limit:,}",
            fix="give rebalance fewer replicas, or leave them room: a higher memory_limit_bytes, or more that is "
            "recomputed",
        )
    return max(0, more)


def _phase_peaks(timeline: Timeline) -> tuple[int, int]:
    """The most bytes in the forward, and in the backward."""
    start = timeline.backward_start
    return max(timeline.totals[:start], default=0), max(timeline.totals[start:], default=0)
