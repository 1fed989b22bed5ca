"""ZB-V: two stages on each rank, laid out as a V, so that the rank that begins a microbatch also ends it.

Takes in ranks and microbatches; gives back a schedule whose stages s and `2 ranks - 1 - s` share a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar.schedules.actions import Action, ComputeKind, Schedule

_DOWN, _UP = 0, 1  # a rank's stage in the first half of the model, and in the second
_Step = tuple[ComputeKind, int]
_F0: _Step = ("forward", _DOWN)
_F1: _Step = ("forward", _UP)
_B0: _Step = ("backward_input", _DOWN)
_B1: _Step = ("backward_input", _UP)
_W0: _Step = ("backward_weight", _DOWN)
_W1: _Step = ("backward_weight", _UP)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """No bubble with equal times and at least `2 ranks - 1` microbatches, within the memory of 1F1B.

    Fewer microbatches run the same lists without those that are not there.

    Source: Qi et al., arXiv:2405.15362, and arXiv:2401.10241, section 6.
    """
    full = max(microbatches, 2 * ranks - 1)
    lists = []
    for rank in range(ranks):
        stages, next_item = (rank, 2 * ranks - 1 - rank), Counter[_Step]()
        actions: list[Action] = []
        for kind, chunk in _steps(rank, ranks, full):
            item = next_item[kind, chunk]
            next_item[kind, chunk] += 1
            if item < microbatches:
                actions.append(Action(kind, stages[chunk], item))
        lists.append(tuple(actions))
    return Schedule("zb-v", 2 * ranks, microbatches, 2, tuple(lists), "v")


def _steps(rank: int, ranks: int, full: int) -> Iterator[_Step]:
    """What a rank does next, each kind and half counting its own microbatches."""
    before = 2 * (ranks - rank) - 1  # forwards until the first microbatch comes back up
    yield from [_F0] * before
    yield from [_F1, _F0] * rank
    yield from [_F1, _B1, _W1] * (ranks - rank)
    started = before + rank
    returned = ranks  # forwards of the upper half so far
    ended = {_DOWN: 0, _UP: ranks - rank}
    while returned < full:
        if started < full:
            yield _F0
            started += 1
        yield from (_B0, _W0, _F1, _B1, _W1)
        returned += 1
        ended = {half: count + 1 for half, count in ended.items()}
    yield from [_B0, _B1] * rank
    yield from [_B0, _W0] * (ranks - rank)
    yield from [_W1] * (full - ended[_UP])
    yield from [_W0] * (full - ended[_DOWN] - (ranks - rank))
