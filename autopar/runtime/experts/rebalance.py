"""Experts placed anew over the groups of ranks that hold them, from how often they were chosen."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.runtime.experts.load import ExpertLoad

Groups = tuple[tuple[int, ...], ...]  # by group of ranks, the experts that it holds
Placer = Callable[[Sequence[Sequence[float]], Sequence[Groups]], Sequence[Groups]]
"""(load [layers, experts], what holds what now by layer) -> what is to hold what; all of one size."""

BALANCED = 1.001  # the slowest group over the mean: nothing is searched for below


@dataclass(frozen=True)
class Rebalance:
    """What `ParallelModule.rebalance` did.

    `before` and `after`: by layer, the experts of each group of ranks. `imbalance_before` and `imbalance_after`: by
    layer, the load of the slowest group over the mean. `kept`: by layer, why it stayed as it was, for those that
    cannot be moved. `received_bytes`: what each rank received, in the order of the ranks.
    """

    before: Mapping[str, Groups]
    after: Mapping[str, Groups]
    imbalance_before: Mapping[str, float]
    imbalance_after: Mapping[str, float]
    kept: Mapping[str, str]
    received_bytes: tuple[int, ...]

    @property
    def moved_bytes(self) -> int:
        """Parameters, gradients and optimizer state that went from one rank to another."""
        return sum(self.received_bytes)

    @property
    def moved_experts(self) -> int:
        """Over all layers, those that another group of ranks holds now."""
        return sum(
            len(set(after) - set(before))
            for layer, groups in self.after.items()
            for before, after in zip(self.before[layer], groups, strict=True)
        )

    def __str__(self) -> str:
        lines = [f"{self.moved_experts} experts moved, {self.moved_bytes:,} bytes between ranks"]
        for layer, before in self.imbalance_before.items():
            lines.append(f"  {layer}: slowest group over mean {before:.3f} -> {self.imbalance_after[layer]:.3f}")
        lines += [f"  {layer}: not moved, {reason}" for layer, reason in self.kept.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Movable:
    """Layers whose experts may change places together, since they have their weights in common."""

    layers: tuple[str, ...]
    load: tuple[float, ...]  # by expert, of all layers
    groups: Groups

    @property
    def imbalance(self) -> float:
        return imbalance_of(self.load, self.groups)


def imbalance_of(load: Sequence[float], groups: Groups) -> float:
    """The load of the slowest group over the mean; 1 without any load."""
    loads = torch.tensor([sum(load[expert] for expert in group) for group in groups], dtype=torch.float64)
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def decide(items: Sequence[Movable], place: Placer) -> str:
    """The groups that each of the items is to have, as JSON. Layers of one size are placed together."""
    answer = [item.groups for item in items]
    sizes: dict[tuple[int, int], list[int]] = {}
    for index, item in enumerate(items):
        if item.imbalance > BALANCED:
            sizes.setdefault((len(item.load), len(item.groups)), []).append(index)
    for chosen in sizes.values():
        found = place([items[index].load for index in chosen], [items[index].groups for index in chosen])
        for index, groups in zip(chosen, found, strict=True):
            if imbalance_of(items[index].load, groups) < items[index].imbalance:
                answer[index] = groups
    return json.dumps(answer)


def read_decision(text: str) -> list[Groups]:
    return [tuple(tuple(group) for group in groups) for groups in json.loads(text)]


def result_of(
    load: ExpertLoad, layers: Sequence[str], after: Mapping[str, Groups], kept: Mapping[str, str]
) -> Callable[[Sequence[int]], Rebalance]:
    """The report, but for the bytes that the ranks received. `load`: before the move."""
    counts, before = {layer: load.counts[layer].tolist() for layer in layers}, load.holders

    def chosen(holders: Mapping[str, Groups]) -> Mapping[str, Groups]:
        return {layer: holders[layer] for layer in layers}

    def measured(holders: Mapping[str, Groups]) -> Mapping[str, float]:
        return {layer: imbalance_of(counts[layer], holders[layer]) for layer in layers}

    pairs = chosen(before), chosen(after), measured(before), measured(after)
    return lambda received_bytes: Rebalance(*pairs, dict(kept), tuple(received_bytes))
