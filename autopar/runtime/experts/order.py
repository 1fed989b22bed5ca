"""Which expert has which row: a layer's weights lie in an order of their own, all else in the model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from autopar.passes.expert_places import ExpertPlaces
from autopar.runtime.experts.row_moves import RowMover


@dataclass
class ExpertOrder:
    """Of layers that share their weights, on all ranks alike. Row r of every weight is expert places.experts[r]."""

    mover: RowMover
    places: ExpertPlaces

    @property
    def experts(self) -> tuple[int, ...]:
        return self.places.experts

    def in_rows(self, value: Tensor) -> Tensor:
        """A tensor whose rows are experts in the model's order, as a new one in the order of the weights' rows."""
        return self.mover.reordered(value, self.experts)[0]

    def in_model_order(self, value: Tensor) -> Tensor:
        """A tensor with the weights' rows, as a new one in the model's order of experts."""
        return self.mover.reordered(value, inverse(self.experts))[0]


def inverse(order: Sequence[int]) -> list[int]:
    """Where each number stands in `order`."""
    places = [0] * len(order)
    for place, number in enumerate(order):
        places[number] = place
    return places


def rows_for(current: Sequence[int], groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The expert of every row, group after group; an expert that stays in its group keeps its row.

    `groups`: the experts that each group of ranks is to own, as many as it has rows.
    """
    found: list[int] = []
    for wanted in groups:
        before = current[len(found) : len(found) + len(wanted)]
        new = iter(sorted(set(wanted) - set(before)))
        found += [expert if expert in wanted else next(new) for expert in before]
    return tuple(found)
