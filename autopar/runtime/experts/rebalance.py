"""Experts placed anew over the groups of ranks that hold them, from how often they were chosen."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from autopar.passes.expert_places import ExpertPlaces, Groups
from autopar.runtime.experts.load import ExpertLoad
from autopar.runtime.experts.order import rows_for

Placer = Callable[[Sequence[Sequence[float]], Sequence[ExpertPlaces]], Sequence[tuple[Groups, Groups]]]
"""(load [layers, experts], where they are now by layer) -> what each group of ranks is to compute, and to own; all of
one size."""

BALANCED = 1.001  # the slowest group over the mean: nothing is searched for below


@dataclass(frozen=True)
class Rebalance:
    """What `ParallelModule.rebalance` did.

    `before` and `after`: by layer, the experts that each group of ranks computes, copies among them. `imbalance_before`
    and `imbalance_after`: by layer, the load of the slowest group over the mean. `kept`: by layer, why it stayed as it
    was, for those that cannot be moved. `received_bytes`: what each rank received, in the order of the ranks.
    `copy_bytes`: by how much copies raise the most that each rank holds in a step above what was planned.
    """

    before: Mapping[str, Groups]
    after: Mapping[str, Groups]
    imbalance_before: Mapping[str, float]
    imbalance_after: Mapping[str, float]
    kept: Mapping[str, str]
    received_bytes: tuple[int, ...]
    copy_bytes: tuple[int, ...]

    @property
    def copies(self) -> int:
        """Over all layers, slots beyond one for each expert."""
        groups = self.after.values()
        return sum(sum(map(len, it)) - len({expert for group in it for expert in group}) for it in groups)

    @property
    def moved_bytes(self) -> int:
        """Parameters, gradients and optimizer state that went from one rank to another."""
        return sum(self.received_bytes)

    @property
    def moved_experts(self) -> int:
        """Over all layers, those that a group of ranks computes now and did not before, copies among them."""
        return sum(
            len(set(after) - set(before))
            for layer, groups in self.after.items()
            for before, after in zip(self.before[layer], groups, strict=True)
        )

    def __str__(self) -> str:
        lines = [f"{self.moved_experts} experts moved or copied, {self.moved_bytes:,} bytes between ranks"]
        if self.copies:
            lines.append(
                f"{self.copies} copies of experts: up to {max(self.copy_bytes):,} bytes more on a rank in a step"
            )
        for layer, before in self.imbalance_before.items():
            lines.append(f"  {layer}: slowest group over mean {before:.3f} -> {self.imbalance_after[layer]:.3f}")
        lines += [f"  {layer}: not moved, {reason}" for layer, reason in self.kept.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Movable:
    """Layers whose experts may change places together, since they have their weights in common."""

    layers: tuple[str, ...]
    load: tuple[float, ...]  # by expert, of all layers
    places: ExpertPlaces

    def start(self, replicas: int | None) -> ExpertPlaces:
        """What to begin with for so many slots in all: where experts are, without copies if there are to be others."""
        slots = sum(map(len, self.places.computed))
        return self.places if slots == (replicas or len(self.load)) else without_copies(self.places)


def without_copies(places: ExpertPlaces) -> ExpertPlaces:
    """Each group computes what it owns."""
    return replace(places, computed=places.owned)


def imbalance_of(load: Sequence[float], groups: Groups) -> float:
    """The load of the slowest group over the mean, slots of one expert sharing its load; 1 without any load."""
    slots = Counter(expert for group in groups for expert in group)
    loads = torch.tensor([sum(load[it] / slots[it] for it in group) for group in groups], dtype=torch.float64)
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def decide(items: Sequence[Movable], place: Placer, replicas: int | None) -> str:
    """What each group is to compute, and to own, by item, as JSON. Layers of one size are placed together.

    `replicas`: slots in all, of every layer; checked by asking, even where nothing is to be done.
    """
    starts = [item.start(replicas) for item in items]
    answer = [(start.computed, start.owned) for start in starts]
    before = [imbalance_of(item.load, start.computed) for item, start in zip(items, starts, strict=True)]
    sizes: dict[tuple[int, int], list[int]] = {}
    for index, start in enumerate(starts):
        if replicas is not None or before[index] > BALANCED:
            sizes.setdefault((len(start.experts), len(start.computed)), []).append(index)
    for chosen in sizes.values():
        found = place([items[index].load for index in chosen], [starts[index] for index in chosen])
        for index, (computed, owned) in zip(chosen, found, strict=True):
            if before[index] > BALANCED and imbalance_of(items[index].load, computed) < before[index]:
                answer[index] = computed, owned
    return json.dumps(answer)


def read_decision(text: str, items: Sequence[Movable]) -> list[ExpertPlaces]:
    """Where the experts of each item are to be."""
    found = []
    for item, (computed, owned) in zip(items, json.loads(text), strict=True):
        places = ExpertPlaces(rows_for(item.places.experts, owned), tuple(map(tuple, computed)), item.places.axes)
        found.append(places if places.has_copies else without_copies(places))
    return found


def result_of(
    load: ExpertLoad, layers: Sequence[str], after: Mapping[str, Groups], kept: Mapping[str, str]
) -> Callable[[Sequence[int], Sequence[int]], Rebalance]:
    """The report, but for the bytes that the ranks received, and those of copies. `load`: before the move."""
    counts, before = {layer: load.counts[layer].tolist() for layer in layers}, load.holders

    def chosen(holders: Mapping[str, Groups]) -> Mapping[str, Groups]:
        return {layer: holders[layer] for layer in layers}

    def measured(holders: Mapping[str, Groups]) -> Mapping[str, float]:
        return {layer: imbalance_of(counts[layer], holders[layer]) for layer in layers}

    pairs = chosen(before), chosen(after), measured(before), measured(after)
    return lambda received, copied: Rebalance(*pairs, dict(kept), tuple(received), tuple(copied))
