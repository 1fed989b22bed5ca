"""Which actions an action needs the results of, wherever they run; and an order of all actions that respects it."""

from __future__ import annotations

import graphlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from autopar.errors import ScheduleError
from autopar.schedules.actions import COMPUTE, Action, ComputeKind, Edge, Schedule

Key = tuple[str, int, int]  # what, stage, microbatch


class Dependencies:
    """The needs of every compute action under the stages' edges."""

    def __init__(self, edges: Iterable[Edge]) -> None:
        self.sources: Mapping[int, list[int]] = defaultdict(list)
        self.readers: Mapping[int, list[int]] = defaultdict(list)
        for source, reader in edges:
            self.sources[reader].append(source)
            self.readers[source].append(reader)

    def needs(self, action: Action) -> Iterator[Key]:
        """Results that a compute action reads: `forward`, `gradient` (of a stage's inputs)."""
        stage, item = action.stage, action.microbatch
        if action.kind == "forward":
            yield from (("forward", source, item) for source in self.sources.get(stage, ()))
        elif action.kind == "backward_weight":
            yield ("gradient", stage, item)
        else:
            yield ("forward", stage, item)
            yield from (("gradient", reader, item) for reader in self.readers.get(stage, ()))

    def peers(self, action: Action) -> list[int]:
        """The stages that read what this compute action gives: later ones of a forward, earlier ones of a backward."""
        if action.kind == "forward":
            return self.readers.get(action.stage, [])
        return [] if action.kind == "backward_weight" else self.sources.get(action.stage, [])


def result_of(action: Action) -> Key:
    """What a compute action gives to others."""
    names: Mapping[str, str] = {"forward": "forward", "backward_weight": "weight"}
    return (names.get(action.kind, "gradient"), action.stage, action.microbatch)


def compute_actions(actions: Iterable[Action]) -> Iterator[Action]:
    """Those that compute, in order."""
    return (action for action in actions if action.kind in COMPUTE)


def compute_kind(action: Action) -> ComputeKind:
    """The kind of an action that computes."""
    for kind in COMPUTE:
        if action.kind == kind:
            return kind
    raise ScheduleError(f"{action}: does not compute", fix="pass a forward or a part of a backward")


def causal_order(schedule: Schedule) -> list[tuple[int, Action]]:
    """Every compute action with its rank, each after what it needs and after its predecessors on its rank."""
    links = Dependencies(schedule.edges)
    keys: dict[Key, tuple[int, int]] = {}
    lists = [list(compute_actions(actions)) for actions in schedule.ranks]
    for rank, actions in enumerate(lists):
        keys |= {result_of(action): (rank, place) for place, action in enumerate(actions)}
    graph: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank, actions in enumerate(lists):
        for place, action in enumerate(actions):
            before = [(rank, place - 1)] if place else []
            graph[rank, place] = before + [_found(keys, key, action, schedule.name) for key in links.needs(action)]
    try:
        return [(rank, lists[rank][place]) for rank, place in graphlib.TopologicalSorter(graph).static_order()]
    except graphlib.CycleError as error:
        circle = [str(lists[rank][place]) for rank, place in error.args[1]]
        raise ScheduleError(
            f"{schedule.name}: actions wait for each other: {' <- '.join(circle[:6])}",
            fix="change the order of one rank's actions",
        ) from None


def _found(keys: Mapping[Key, tuple[int, int]], key: Key, action: Action, name: str) -> tuple[int, int]:
    if key not in keys:
        raise ScheduleError(
            f"{name}: {action} needs the {key[0]} of stage {key[1]} for microbatch {key[2]}, which no rank computes",
            fix="add the missing action",
        )
    return keys[key]
