"""Parameters of pipeline stages on the host: which may lie there, and what each rank's host holds.

Every action that reads such a parameter copies it to the device and lets go of the copy at its end. Its gradient goes
to the host with each microbatch and is added up there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum, auto

from autopar.capture.program import InputKind, Program
from autopar.folding import name_matches
from autopar.planner.make import Options, Planned
from autopar.planner.residency import HOSTED
from autopar.schedules.actions import Schedule
from autopar.stages.staged import Staged


def kept_on_devices(staged: Staged) -> dict[str, str]:
    """By name, why a parameter of a pipeline does not lie on the host; those that may are left out."""
    pieces = staged.microbatches
    if pieces.independent and not pieces.accumulated:
        names = (item.name for item in staged.program.inputs if item.kind is InputKind.PARAMETER)
        return dict.fromkeys(names, "an asynchronous schedule updates it while microbatches are under way")
    return dict.fromkeys(staged.first.shared, "several stages read it, and sum its gradient on their devices")


class Hosted(Enum):
    """The parameters that a search counts on the host: those that are pinned there; or all that may be, of which the
    plans of the stages put as many there as they need; or all of them, needed or not."""

    PINNED = auto()
    ANY = auto()
    ALL = auto()


def hosted_parameters(program: Program, options: Options, which: Hosted) -> frozenset[str]:
    """The names of the parameters that lie on the host, or may; some of them stages may turn out to share."""
    pins = [item for item in options.constraints if item.layout in ("keep", HOSTED)]
    found = set[str]()
    for name, node in program.named_inputs(InputKind.PARAMETER).items():
        words = {item.layout for item in pins if name_matches(name, item.pattern)}
        if node.meta["val"].dim() and (HOSTED in words or (which is not Hosted.PINNED and not words)):
            found.add(name)
    return frozenset(found)


def rank_host_memory(schedule: Schedule, planned: Sequence[Planned], held: Sequence[int]) -> dict[str, int]:
    """What the rank whose host holds most has there, in bytes by kind: an upper bound.

    `held`: microbatches in flight of each stage, all of whose offloaded values are there at once. Where there are
    several microbatches, the gradients of one are there beside the sums.
    """
    found = [Counter[str]() for _ in schedule.ranks]
    beside = [0] * len(schedule.ranks)
    for stage, item in enumerate(planned):
        timeline, rank = item.best.measured.timeline, schedule.rank_of(stage)
        most: dict[str, int] = {kind: max(values) for kind, values in timeline.host_by_kind.items()}
        own = {**item.plan.host_memory, **most}
        own["saved"] = max(1, held[stage]) * most.get("saved", 0)
        found[rank].update(own)
        beside[rank] = max(beside[rank], most.get("gradient", 0))
    if schedule.microbatches > 1:
        for rank, bytes_ in enumerate(beside):
            found[rank]["gradient"] += bytes_
    return _without_nothing(max(found, key=lambda memory: sum(memory.values())))


def _without_nothing(memory: Mapping[str, int]) -> dict[str, int]:
    return {kind: bytes_ for kind, bytes_ in memory.items() if bytes_}
