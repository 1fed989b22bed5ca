"""How many tokens chose each expert, since counting began: on each rank its own, and in all when somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import UnsupportedOptionError
from autopar.passes.expert_places import ExpertPlaces, Groups
from autopar.passes.observed import ExpertCount


@dataclass(frozen=True)
class ExpertLoad:
    """Choices by expert, of the tokens of all ranks; dropped ones do not count.

    `counts`: by path of the layer, int64 [experts]. `spans`: by layer, first and end of the rows of weights that each
    group of ranks holds; one span where every rank holds all. `placed`: by layer that was rebalanced, where its experts
    are; in all others expert e has row e.
    """

    counts: Mapping[str, Tensor]
    spans: Mapping[str, tuple[tuple[int, int], ...]]
    placed: Mapping[str, ExpertPlaces] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[str, ...]:
        """The paths of the layers of experts, in the order of the program."""
        return tuple(self.counts)

    @property
    def matrix(self) -> Tensor:
        """int64 [layers, experts], as `autopar.search.place_experts` takes it."""
        sizes = {layer: len(count) for layer, count in self.counts.items()}
        if len(set(sizes.values())) > 1:
            raise UnsupportedOptionError(
                f"layers have unequal numbers of experts: {sizes}", fix="use `counts`, layer by layer"
            )
        return torch.stack(list(self.counts.values())) if sizes else torch.zeros((0, 0), dtype=torch.int64)

    @property
    def owners(self) -> Mapping[str, Groups]:
        """By layer, the experts whose weights each group of ranks holds, in the order of their rows."""
        found: dict[str, Groups] = {}
        for layer, spans in self.spans.items():
            places = self.placed.get(layer)
            experts = range(len(self.counts[layer])) if places is None else places.experts
            found[layer] = tuple(tuple(experts[start:end]) for start, end in spans)
        return MappingProxyType(found)

    @property
    def holders(self) -> Mapping[str, Groups]:
        """By layer, the experts that each group of ranks computes, in the order of the mesh; copies among them."""
        found = dict(self.owners)
        for layer, places in self.placed.items():
            if layer in found and len(places.computed) == len(found[layer]):
                found[layer] = places.computed
        return MappingProxyType(found)

    @property
    def device_load(self) -> Mapping[str, Tensor]:
        """By layer, int64 [groups]: the choices that each group of ranks computes, in the order of the mesh. An expert
        with copies shares its choices out evenly."""
        return MappingProxyType(
            {layer: torch.tensor(shared_load(self.counts[layer].tolist(), it)) for layer, it in self.holders.items()}
        )

    @property
    def imbalance(self) -> Mapping[str, float]:
        """By layer, the load of the slowest group of ranks over the mean of the groups; 1 without any load."""
        return MappingProxyType({layer: _imbalance(load) for layer, load in self.device_load.items()})

    @property
    def expert_imbalance(self) -> Mapping[str, float]:
        """By layer, the load of the most chosen expert over the mean of all; 1 without any load."""
        return MappingProxyType({layer: _imbalance(count) for layer, count in self.counts.items()})


def shared_load(counts: Sequence[int], groups: Groups) -> list[int]:
    """The choices of each group: those of an expert in several slots are dealt out to them in turn."""
    slots = Counter(expert for group in groups for expert in group)
    passed, found = Counter[int](), []
    for group in groups:
        total = 0
        for expert in group:
            share, rest = divmod(counts[expert], slots[expert])
            total += share + (passed[expert] < rest)
            passed[expert] += 1
        found.append(total)
    return found


def _imbalance(load: Tensor) -> float:
    mean = float(load.double().mean())
    return float(load.max()) / mean if mean > 0 else 1.0


@dataclass
class ExpertCounter:
    """Adds up what the forward graphs of this rank return."""

    mesh: DeviceMesh
    sums: dict[ExpertCount, Tensor] = field(default_factory=dict)

    def expect(self, what: Sequence[ExpertCount]) -> None:
        """Count these from zero, unless they are counted already."""
        for key in what:
            experts = max(end for _, end in key.spans)
            self.sums.setdefault(key, torch.zeros(experts, dtype=torch.int64, device=self.mesh.device_type))

    def add(self, what: Sequence[ExpertCount], counts: Sequence[Tensor]) -> None:
        """The counts of one call, of what was expected."""
        for key, count in zip(what, counts, strict=True):
            self.sums[key] += count

    def reset(self) -> None:
        """Start anew."""
        for count in self.sums.values():
            count.zero_()

    def load(self, placed: Mapping[str, ExpertPlaces]) -> ExpertLoad:
        """In all; to be called on every rank of the mesh. Several shapes of input, and several calls of one layer, add
        up. `placed`: see `ExpertLoad`."""
        counts: dict[str, Tensor] = {}
        spans: dict[str, tuple[tuple[int, int], ...]] = {}
        for key, count in self.sums.items():
            total = count.clone()
            for axis in key.axes:
                dist.all_reduce(total, group=self.mesh.get_group(axis))
            counts[key.layer] = counts[key.layer] + total.cpu() if key.layer in counts else total.cpu()
            spans[key.layer] = key.spans
        return ExpertLoad(MappingProxyType(counts), MappingProxyType(spans), MappingProxyType(dict(placed)))


Spans = Mapping[str, tuple[tuple[int, int], ...]]


def of_all_stages(
    parts: Sequence[tuple[Sequence[tuple[str, list[int]]], Spans]],
    layers: Sequence[str],
    placed: Mapping[str, ExpertPlaces],
) -> ExpertLoad:
    """From the counts and the spans that each rank of a pipeline has of its own stages; `layers` in their order.

    The ranks of one stage have the same. `placed`: see `ExpertLoad`.
    """
    counts = {layer: count for own, _ in parts for layer, count in own}
    spans = {layer: held for _, own in parts for layer, held in own.items()}
    known = [layer for layer in dict.fromkeys(layers) if layer in counts]
    return ExpertLoad(
        MappingProxyType({layer: torch.tensor(counts[layer], dtype=torch.int64) for layer in known}),
        MappingProxyType({layer: spans[layer] for layer in known}),
        MappingProxyType(dict(placed)),
    )
