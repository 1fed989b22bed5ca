"""Schedules without a flush: every stage updates its weights while other microbatches are under way.

The order is 1F1B without an end. What differs is which version of the weights a microbatch meets:

- PipeDream: the newest at its forward, and the same again at its backward, which is stashed until then.
- PipeDream with vertical sync: at every stage the version that the first stage had at its forward.
- PipeDream-2BW: updates after groups of microbatches; group g runs with version max(g - 1, 0), so two are ever needed.

Sources: Harlap et al., arXiv:1806.03377, section 3.3; Narayanan et al., arXiv:2006.09503, section 3.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autopar.errors import ScheduleError
from autopar.schedules.actions import Action, Schedule
from autopar.schedules.synchronous import one_forward_one_backward


def pipedream(ranks: int, microbatches: int) -> Schedule:
    """Update after every microbatch, with weight stashing."""
    return _with_versions("pipedream", ranks, microbatches, 1, lambda stage, item: max(0, item - (ranks - stage - 1)))


def pipedream_vertical(ranks: int, microbatches: int) -> Schedule:
    """Update after every microbatch; a microbatch meets one version at all stages."""
    return _with_versions("pipedream-vertical", ranks, microbatches, 1, lambda _, item: max(0, item - (ranks - 1)))


def pipedream_2bw(ranks: int, microbatches: int, update_every: int) -> Schedule:
    """Update after every `update_every` microbatches, two versions of the weights."""
    if update_every < ranks:
        raise ScheduleError(
            f"pipedream-2bw: {update_every} microbatches for each update are fewer than the {ranks} ranks, "
            "so two versions of the weights would not do",
            fix=f"use at least {ranks} microbatches for each update, or pipedream",
        )
    if microbatches % update_every:
        raise ScheduleError(
            f"pipedream-2bw: {microbatches} microbatches are not whole groups of {update_every}",
            fix=f"use a multiple of {update_every} microbatches",
        )
    versions = lambda _, item: max(0, item // update_every - 1)  # noqa: E731
    return _with_versions("pipedream-2bw", ranks, microbatches, update_every, versions)


def _with_versions(
    name: str, ranks: int, microbatches: int, update_every: int, version_of: Callable[[int, int], int]
) -> Schedule:
    base = one_forward_one_backward(ranks, microbatches)
    lists = tuple(tuple(_versioned(actions, update_every, version_of)) for actions in base.ranks)
    return replace(base, name=name, ranks=lists, update_every=update_every)


def _versioned(actions: Sequence[Action], update_every: int, version_of: Callable[[int, int], int]) -> Iterator[Action]:
    """The list of one rank with its updates, and the copies of weights that outlive them."""
    uses = Counter(version_of(action.stage, action.microbatch) for action in actions)  # left, by version
    newest, done, stashed = 0, 0, set[int]()
    for action in actions:
        stage, item = action.stage, action.microbatch
        version = version_of(stage, item)
        if version != newest:
            yield Action("restore_weights", stage, item, version=version)
        yield replace(action, version=version)
        uses[version] -= 1
        if version in stashed and not uses[version]:
            stashed.remove(version)
            yield Action("drop_weights", stage, item, version=version)
        if action.kind != "backward":
            continue
        done += 1
        if done % update_every == 0:
            if uses[newest]:
                stashed.add(newest)
                yield Action("stash_weights", stage, item, version=newest)
            newest += 1
            yield Action("optimizer_step", stage, item, version=newest)
