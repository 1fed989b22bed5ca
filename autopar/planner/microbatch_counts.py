"""How many microbatches a pipeline may have, and what one of any number costs, from what those of two numbers cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from autopar.planner.segments import Segments

MOST_COUNTS = 8  # that the stage search tries
MOST_PER_RANK = 16  # microbatches, beyond which the bubble is small whatever the schedule
ONCE = ("cuts", "fixed_bytes", "sync_s")  # the same for every microbatch, however large


def sensible_counts(batch: int, ranks: Sequence[int]) -> list[int]:
    """The numbers of microbatches to try, ascending: those that divide a batch such that what one of them has divides
    over the longest axis of a stage's mesh (`ranks`: of its axes), if the batch does. Of many, some all along.
    """
    divisors = [count for count in range(1, batch + 1) if batch % count == 0]
    for sharing in sorted(set(ranks), reverse=True):
        whole = [count for count in divisors if (batch // count) % sharing == 0]
        if whole:
            return _thinned(whole)
    return _thinned(divisors)


def _thinned(counts: list[int]) -> list[int]:
    """At most `MOST_COUNTS`, as even in ratio as can be, the ends among them."""
    while len(counts) > MOST_COUNTS:
        ratios = [above / below for below, above in zip(counts, counts[2:], strict=False)]
        del counts[1 + ratios.index(min(ratios))]
    return counts


def reference_counts(counts: Sequence[int], ranks: int) -> tuple[int, int]:
    """The two of several numbers of microbatches from which the prices of the others follow, the likeliest first."""
    cut = [count for count in counts if count > 1]  # one microbatch is the program as it is
    likely = max([count for count in cut if count <= MOST_PER_RANK * ranks], default=cut[0])
    others = [count for count in cut if count != likely]
    return likely, min(others, key=lambda count: max(count, likely / 2) / min(count, likely / 2))


@dataclass(frozen=True)
class Reference:
    """The segments of a microbatch that has so many samples."""

    samples: float
    segments: Segments


def segments_between(first: Reference, second: Reference, samples: float) -> Segments:
    """The segments of a microbatch of any size, cut where both references are: times and bytes are a constant and a
    share of the samples each. That is what a launch and an efficiency `size / (size + half)` make of an op's time."""
    slope = (samples - first.samples) / (second.samples - first.samples)
    found = {}
    for item in fields(Segments):
        if item.name not in ONCE:
            own, other = getattr(first.segments, item.name), getattr(second.segments, item.name)
            least = own * min(1.0, samples / first.samples)  # less than its share no microbatch takes
            found[item.name] = (own + slope * (other - own)).clip(min=least)
    return replace(first.segments, **found)
