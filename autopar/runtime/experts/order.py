"""Which expert stands in which slot: a layer's weights lie in the order of slots, all else in the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.experts.row_moves import RowMover


@dataclass
class ExpertOrder:
    """Of layers that share their weights, on all ranks alike. Slot s is row s of every weight, expert e the model's."""

    mover: RowMover
    experts: tuple[int, ...]  # by slot
    slots: Tensor  # int64 [experts], by expert its slot: what the graphs read

    @classmethod
    def natural(cls, mover: RowMover, count: int, device: str) -> ExpertOrder:
        """Expert e in slot e."""
        return cls(mover, tuple(range(count)), torch.arange(count, device=device))

    @property
    def is_natural(self) -> bool:
        return self.experts == tuple(range(len(self.experts)))

    def change(self, experts: Sequence[int]) -> None:
        """From here on slot s has experts[s]; the weights are the caller's to move."""
        self.experts = tuple(experts)
        self.slots.copy_(torch.tensor(inverse(experts)))

    def in_slots(self, value: Tensor) -> Tensor:
        """A tensor whose rows are experts in the model's order, as a new one in the order of slots."""
        return self.mover.reordered(value, self.experts)[0]

    def in_model_order(self, value: Tensor) -> Tensor:
        """A tensor whose rows are slots, as a new one in the model's order of experts."""
        return self.mover.reordered(value, inverse(self.experts))[0]


def inverse(order: Sequence[int]) -> list[int]:
    """Where each number stands in `order`."""
    places = [0] * len(order)
    for place, number in enumerate(order):
        places[number] = place
    return places


def slots_for(current: Sequence[int], groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The expert of every slot, group after group; an expert that stays in its group keeps its slot.

    `groups`: the experts of each group of ranks, as many as it has slots.
    """
    found: list[int] = []
    for wanted in groups:
        before = current[len(found) : len(found) + len(wanted)]
        new = iter(sorted(set(wanted) - set(before)))
        found += [expert if expert in wanted else next(new) for expert in before]
    return tuple(found)
