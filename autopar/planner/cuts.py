"""Where to cut a program into stages: at narrow places, so that the slowest stage is as fast as can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import fx

from autopar.capture.program import InputKind
from autopar.errors import PlanError
from autopar.planner.node_prices import compute_seconds, computes
from autopar.planner.prices import Prices
from autopar.sharding.assignment import is_getitem
from autopar.stages.assign import Anatomy, assign_stages, owner, size_of
from autopar.stages.staged import Staged

MOST_PLACES = 384  # candidates for a cut: the narrowest


@dataclass(frozen=True)
class Places:
    """Candidates for cuts, as numbers of forward ops, and what lies between them.

    `seconds`: of the forward and the backward of each segment, `sent_bytes`: that a cut at each place sends forward.
    Segment i ends at place i; the last one at the end of the program.
    """

    cuts: tuple[int, ...]
    seconds: npt.NDArray[np.float64]
    sent_bytes: npt.NDArray[np.float64]
    readers: npt.NDArray[np.int64]  # ops of each segment that read a parameter: no stage is to be without


def places(found: Anatomy, prices: Prices) -> Places:
    """The narrow places of a program: no more is sent there than right before or right after."""
    width = crossing_bytes(found)
    ops = [not is_getitem(node) for node in found.forward]
    around = np.where(width > 0, width, np.inf)
    inner = [
        index
        for index in range(1, len(found.forward))
        if ops[index] and 0 < width[index] <= min(around[index - 1], around[index + 1])
    ]
    return places_at(found, _narrowest(inner, width), prices)


def places_at(found: Anatomy, narrow: Sequence[int], prices: Prices) -> Places:
    """Given places of a program, and what lies between them."""
    seconds = np.zeros(len(narrow) + 1)
    assignment = assign_stages(found, narrow)
    for node, stage in assignment.stage.items():
        if computes(node):
            seconds[stage] += compute_seconds(node, prices)
    readers = np.zeros(len(narrow) + 1, dtype=np.int64)
    for node in found.forward:
        readers[assignment.stage[node]] += any(found.parameters.get(source) for source in node.all_input_nodes)
    return Places(tuple(narrow), seconds, crossing_bytes(found)[list(narrow)] if narrow else np.zeros(0), readers)


def same_cuts(found: Anatomy, cuts: Sequence[int], other: Anatomy) -> tuple[int, ...] | None:
    """The places of another microbatch of the same program before the same ops; None where it has not all of them."""
    places_by_key = {node.meta["key"]: index for index, node in enumerate(other.forward)}
    same = [places_by_key.get(found.forward[cut].meta["key"]) for cut in cuts]
    known = tuple(place for place in same if place is not None)
    return known if len(known) == len(cuts) and list(known) == sorted(set(known)) else None


def _narrowest(candidates: Sequence[int], width: npt.NDArray[np.float64]) -> list[int]:
    """The `MOST_PLACES` narrowest; of the widest ones among them, as wide as each other, some all along the program."""
    if len(candidates) <= MOST_PLACES:
        return list(candidates)
    limit = sorted(width[list(candidates)])[MOST_PLACES]
    kept = [index for index in candidates if width[index] < limit]
    equal = [index for index in candidates if width[index] == limit]
    room = MOST_PLACES - len(kept)
    return sorted([*kept, *(equal[at * len(equal) // room] for at in range(room))])


def crossing_bytes(found: Anatomy) -> npt.NDArray[np.float64]:
    """Per number of a forward op, the bytes of what was made before it and is read from it on."""
    order = found.order
    last: dict[fx.Node, int] = {}
    for node, index in order.items():
        if not is_getitem(node):
            last.update((source, index) for source in node.all_input_nodes if source in order)
    width = np.zeros(len(order) + 2)
    for node, end in last.items():
        start = order[owner(node)]
        width[start + 1] += size_of(node)
        width[end + 1] -= size_of(node)
    return np.cumsum(width)


def balanced_cuts(found: Places, stages: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """The cuts whose slowest stage takes least; of those, that send least. Exact, by dynamic programming.

    `speeds`: of the stages' devices; 0.5 takes twice as long.
    """
    segments = len(found.seconds)
    if segments < stages:
        raise PlanError(
            f"the program has {len(found.cuts)} places to cut it, not {stages - 1}",
            fix=f"use stages={segments} or fewer",
        )
    before, reads = _sums(found)
    best = np.full((stages + 1, segments + 1), np.inf)
    best[0, 0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, segments - (stages - stage) + 1):
            starts = np.arange(stage - 1, end)
            slowest = np.maximum(best[stage - 1, starts], (before[end] - before[starts]) / speeds[stage - 1])
            best[stage, end] = np.where(reads[end] > reads[starts], slowest, np.inf).min()
    if not np.isfinite(best[stages, segments]):
        raise PlanError(f"not every one of {stages} stages would have a parameter", fix="use fewer stages")
    return _least_sent(found, stages, speeds, float(best[stages, segments]))


def _sums(found: Places) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Per place, the seconds before it, and the readers of parameters."""
    zero = np.zeros(1, dtype=np.int64)
    return np.concatenate([zero, np.cumsum(found.seconds)]), np.concatenate([zero, np.cumsum(found.readers)])


def _least_sent(found: Places, stages: int, speeds: Sequence[float], limit: float) -> tuple[int, ...]:
    """Of the cuts with no stage slower than `limit`, those that send the least bytes."""
    segments, slack = len(found.seconds), limit * (1 + 1e-9)
    before, reads = _sums(found)
    sent = np.full((stages + 1, segments + 1), np.inf)
    origin = np.zeros((stages + 1, segments + 1), dtype=int)
    sent[0, 0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, segments - (stages - stage) + 1):
            starts = np.arange(stage - 1, end)
            fits = ((before[end] - before[starts]) / speeds[stage - 1] <= slack) & (reads[end] > reads[starts])
            own = found.sent_bytes[end - 1] if end < segments else 0.0
            totals = np.where(fits, sent[stage - 1, starts] + own, np.inf)
            pick = int(totals.argmin())
            sent[stage, end], origin[stage, end] = totals[pick], starts[pick]
    ends, end = [], segments
    for stage in range(stages, 0, -1):
        end = int(origin[stage, end])
        ends.append(end)
    return tuple(found.cuts[end - 1] for end in reversed(ends[:-1]))


def cuts_like(found: Anatomy, like: Staged) -> tuple[int, ...]:
    """Cuts of another program of the same model that leave every parameter on the stages that hold it.

    Between the last op of the stages before a cut and the first one behind it, the narrowest place.
    """
    holders: dict[str, set[int]] = {}
    for stage in like.stages:
        for item in stage.program.inputs:
            if item.kind is InputKind.PARAMETER:
                holders.setdefault(item.name, set()).add(stage.index)
    names = {item.node: item.name for item in found.program.inputs if item.kind is InputKind.PARAMETER}
    width, cuts = crossing_bytes(found), list[int]()
    stages_of = [_stages_of(found, node, names, holders) for node in found.forward]
    for cut in range(1, len(like.stages)):
        before = [index for index, stages in enumerate(stages_of) if stages and max(stages) < cut]
        behind = [index for index, stages in enumerate(stages_of) if stages and min(stages) >= cut]
        first = max([*before, *(cuts[-1:] or [0])]) + 1
        last = min([*behind, len(found.forward) - 1])
        window = [index for index in range(first, last + 1) if not is_getitem(found.forward[index])]
        if not window:
            raise PlanError(
                "the ops of this call do not keep to the stages that hold their parameters",
                fix="compile the model anew for calls of this kind",
            )
        cuts.append(min(window, key=lambda index: width[index]))
    return tuple(cuts)


def _stages_of(found: Anatomy, node: fx.Node, names: Mapping[str, str], holders: Mapping[str, set[int]]) -> set[int]:
    """The stages on which an op can run: those that hold all its parameters; none if it has no parameter."""
    read = [
        holders[names[parameter.name]]
        for source in node.all_input_nodes
        for parameter in found.parameters.get(source, ())
        if names.get(parameter.name) in holders
    ]
    return set.intersection(*read) if read else set()
