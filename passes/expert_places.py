"""Which rows of its weights a layer's experts have, which groups of ranks compute them, and the way of the copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

Groups = tuple[tuple[int, ...], ...]  # by group of ranks, experts
Place = tuple[int, ...]  # coordinates of a group


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """`experts`: whose weights each row holds; the groups own equally many rows, one group after the other. `computed`:
    by group, the experts whose tokens it computes, once for each slot: an expert in several has copies. `axes`: the
    mesh axes along which the groups stand.
    """

    experts: tuple[int, ...]
    computed: Groups
    axes: tuple[int, ...]

    @property
    def owned(self) -> Groups:
        """By group, the experts whose weights it holds, row by row."""
        size = len(self.experts) // len(self.computed)
        return tuple(self.experts[start : start + size] for start in range(0, len(self.experts), size))

    @property
    def has_copies(self) -> bool:
        """Whether any group computes other experts than it owns."""
        return any(sorted(own) != sorted(all_) for own, all_ in zip(self.owned, self.computed, strict=True))


@dataclass(frozen=True, slots=True)
class Hop:
    """Along mesh `axis`, `rows` of what a rank has go to the others: the first sent[0] to the first of them, and so on;
    coming[0] come from the first."""

    axis: int
    rows: tuple[int, ...]
    sent: tuple[int, ...]
    coming: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Routes:
    """`hops`: by group, what it does with its rows, one axis after the other, so that an expert crosses an earlier axis
    once for all along the later ones. `arrived`: by group, the experts that it has in the end, in their order.
    """

    hops: Mapping[Place, tuple[Hop, ...]]
    arrived: Mapping[Place, tuple[int, ...]]


def routes_of(places: ExpertPlaces, mesh_shape: tuple[int, ...]) -> Routes:
    """How every group comes by the weights of all experts that it computes, its own ones among them."""
    groups = list(product(*(range(mesh_shape[axis]) for axis in places.axes)))
    here: dict[Place, tuple[int, ...]] = dict(zip(groups, places.owned, strict=True))
    hops: dict[Place, tuple[Hop, ...]] = dict.fromkeys(groups, ())
    for depth, axis in enumerate(places.axes):
        wanted = defaultdict[Place, set[int]](set)  # by the first coordinates, up to this axis
        for group, experts in zip(groups, places.computed, strict=True):
            wanted[group[: depth + 1]] |= set(experts)
        ranks, held = range(mesh_shape[axis]), here
        given = {
            group: [[row for row, it in enumerate(held[group]) if it in wanted[(*group[:depth], to)]] for to in ranks]
            for group in groups
        }
        for group in groups:
            peers = [(*group[:depth], rank, *group[depth + 1 :]) for rank in ranks]
            coming = [given[peer][group[depth]] for peer in peers]
            rows = tuple(row for part in given[group] for row in part)
            hops[group] += (Hop(axis, rows, tuple(map(len, given[group])), tuple(map(len, coming))),)
            experts = tuple(held[peer][row] for peer, part in zip(peers, coming, strict=True) for row in part)
            here = {**here, group: experts}
    return Routes(hops, here)


def slots_per_group(places: ExpertPlaces) -> int:
    """By how many the numbers of two groups' slots are apart."""
    return max(map(len, places.computed))


def row_table(places: ExpertPlaces) -> Tensor:
    """int64 [experts, 1]: the row of each expert."""
    return torch.tensor(places.experts).argsort()[:, None]


def slot_table(places: ExpertPlaces, routes: Routes) -> Tensor:
    """int64 [experts, most]: the slots of each expert, then -1. A group's slots are numbered as its experts arrive."""
    found: list[list[int]] = [[] for _ in places.experts]
    for number, (group, experts) in enumerate(zip(routes.arrived, places.computed, strict=True)):
        first = number * slots_per_group(places)
        for expert in experts:
            found[expert].append(first + routes.arrived[group].index(expert))
    most = max(map(len, found))
    return torch.tensor([[*slots, *[-1] * (most - len(slots))] for slots in found])
