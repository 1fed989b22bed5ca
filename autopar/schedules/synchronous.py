"""Schedules of fixed order whose stages go around the ranks: GPipe, 1F1B, interleaved 1F1B, ZB-H1 and ZB-H2.

All but GPipe are one pattern: a rank runs some forwards ahead, then one forward and one backward in turn. They differ
in how many are ahead, in which of its stages is next, and in when the gradients of the weights follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import ScheduleError
from autopar.schedules.actions import Action, ComputeKind, Schedule


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    Source: Huang et al., arXiv:1811.06965.
    """
    lists = tuple(
        tuple(Action("forward", rank, item) for item in range(microbatches))
        + tuple(Action("backward", rank, item) for item in range(microbatches))
        for rank in range(ranks)
    )
    return Schedule("gpipe", ranks, microbatches, 1, lists)


def one_forward_one_backward(ranks: int, microbatches: int) -> Schedule:
    """1F1B: rank r runs `ranks - r - 1` forwards ahead.

    Source: Narayanan et al., arXiv:2006.09503 (PipeDream-Flush).
    """
    lists = (_in_turn(*_orders(rank, ranks, microbatches, 1), ranks - rank - 1) for rank in range(ranks))
    return Schedule("1f1b", ranks, microbatches, 1, tuple(lists))


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B with several stages on each rank, one group of microbatches at a time through each of them.

    Source: Narayanan et al., arXiv:2104.04473, section 2.2, for microbatches that divide by the ranks. Else the groups
    are larger than the ranks, as in torch.distributed.pipelining.
    """
    group = _group(ranks, microbatches, chunks, "interleaved")
    lists = []
    for rank in range(ranks):
        ahead = 2 * (ranks - rank - 1) + (chunks - 1) * group
        lists.append(_in_turn(*_orders(rank, ranks, microbatches, chunks), ahead))
    return Schedule("interleaved", ranks * chunks, microbatches, chunks, tuple(lists))


def zb_h1(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """1F1B whose weight gradients fill its gaps, within the memory of 1F1B: rank r has r of them waiting.

    Source: Qi et al., arXiv:2401.10241, section 2.2; with several stages on a rank, as in torch.distributed.pipelining.
    """
    group = _group(ranks, microbatches, chunks, "zb-h1")
    lists = []
    for rank in range(ranks):
        ahead = ranks - rank - 1 + (chunks - 1) * group
        lists.append(_in_turn_split(*_orders(rank, ranks, microbatches, chunks), ahead, rank))
    return Schedule("zb-h1", ranks * chunks, microbatches, chunks, tuple(lists))


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """No bubble with equal times and at least `2 ranks - 1` microbatches, for twice the activations of 1F1B.

    Source: Qi et al., arXiv:2401.10241, section 2.3.
    """
    lists = []
    for rank in range(ranks):
        orders = _orders(rank, ranks, microbatches, 1)
        lists.append(_in_turn_split(*orders, 2 * (ranks - rank - 1), 2 * rank))
    return Schedule("zb-h2", ranks, microbatches, 1, tuple(lists))


def _group(ranks: int, microbatches: int, chunks: int, name: str) -> int:
    """How many microbatches go through a rank's stage before its next one takes over."""
    if chunks == 1:
        return ranks
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        near = [count for count in range(max(1, microbatches - ranks), microbatches + ranks + 1)
                if count % max(1, count // ranks) == 0]  # fmt: skip
        raise ScheduleError(
            f"{name}: {microbatches} microbatches do not fall into {rounds} equal groups of at least {ranks}",
            fix=f"use one of {near} microbatches, or 1f1b",
        )
    return microbatches // rounds


_Orders = tuple[list[tuple[int, int]], list[tuple[int, int]]]  # (stage, microbatch) of forwards, and of backwards


def _orders(rank: int, ranks: int, microbatches: int, chunks: int) -> _Orders:
    group = microbatches // max(1, microbatches // ranks) if chunks > 1 else 1
    forwards, backwards = [], []
    for first in range(0, microbatches, group):
        items = range(first, first + group)
        forwards += [(chunk * ranks + rank, item) for chunk in range(chunks) for item in items]
        backwards += [(chunk * ranks + rank, item) for chunk in reversed(range(chunks)) for item in items]
    return forwards, backwards


def _in_turn(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], ahead: int
) -> tuple[Action, ...]:
    """`ahead` forwards, then forward and backward in turn, then the backwards that are left."""
    return tuple(_alternate(forwards, backwards, ahead, "backward"))


def _in_turn_split(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], ahead: int, waiting: int
) -> tuple[Action, ...]:
    """The same with split backwards; the weight gradients follow when more than `waiting` of them are due."""
    actions: list[Action] = []
    due = 0
    for action in _alternate(forwards, backwards, ahead, "backward_input"):
        actions.append(action)
        if action.kind == "backward_input":
            due += 1
            if due > waiting:
                actions.append(Action("backward_weight", *backwards[due - waiting - 1]))
    actions += [Action("backward_weight", *place) for place in backwards[max(0, due - waiting) :]]
    return tuple(actions)


def _alternate(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], ahead: int, kind: ComputeKind
) -> list[Action]:
    ahead = min(ahead, len(forwards))
    actions = [Action("forward", *place) for place in forwards[:ahead]]
    for count, place in enumerate(backwards):
        if count + ahead < len(forwards):
            actions.append(Action("forward", *forwards[count + ahead]))
        actions.append(Action(kind, *place))
    return actions
