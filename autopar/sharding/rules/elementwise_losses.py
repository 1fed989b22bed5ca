"""Losses that compare element by element: unreduced, summed, or averaged over the elements of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest

from torch.distributed.tensor import Shard

from autopar.sharding.op_call import OpCall
from autopar.sharding.rule import Rule
from autopar.sharding.rules.placing import SUM, RuleTable, place, result
from autopar.sharding.rules.pointwise import aligned

SHARE = "share"  # a mean is scaled by the share of the elements that lie here
NO_REDUCTION, MEAN_REDUCTION = 0, 1


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape to which shapes broadcast."""
    columns = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return tuple(reversed([next((size for size in column if size != 1), 1) for column in columns]))


def loss(reduction: int) -> Callable[[OpCall], Iterator[Rule]]:
    """Rules of `loss(self, target, ..., reduction)`, with the reduction at that position."""

    def rules(call: OpCall) -> Iterator[Rule]:
        shape = broadcast(*(spec.shape for spec in call.inputs))
        kind = call.argument(reduction, "reduction", MEAN_REDUCTION)
        for dim, size in enumerate(shape):
            if size > 1:
                inputs = tuple(aligned(spec, dim, shape) for spec in call.inputs)
                output = Shard(dim) if kind == NO_REDUCTION else SUM
                yield Rule(inputs, (output,), form=SHARE if kind == MEAN_REDUCTION else "")

    return rules


def loss_backward(reduction: int) -> Callable[[OpCall], Iterator[Rule]]:
    """Rules of `loss_backward(grad_output, self, target, ..., reduction)`."""

    def rules(call: OpCall) -> Iterator[Rule]:
        shape = result(call).shape
        form = SHARE if call.argument(reduction, "reduction", MEAN_REDUCTION) == MEAN_REDUCTION else ""
        for dim, size in enumerate(shape):
            if size > 1:
                yield Rule(tuple(aligned(spec, dim, shape) for spec in call.inputs), (Shard(dim),), form=form)
        yield place(call, {0: SUM}, SUM)

    return rules


REDUCTION_AT: dict[str, int] = {  # position of the argument `reduction`
    "aten.mse_loss.default": 2,
    "aten.smooth_l1_loss.default": 2,
    "aten.huber_loss.default": 2,
    "aten.soft_margin_loss.default": 2,
    "aten.binary_cross_entropy.default": 3,
    "aten.binary_cross_entropy_with_logits.default": 4,
}
BACKWARD_REDUCTION_AT: dict[str, int] = {
    "aten.mse_loss_backward.default": 3,
    "aten.smooth_l1_loss_backward.default": 3,
    "aten.huber_loss_backward.default": 3,
    "aten.soft_margin_loss_backward.default": 3,
    "aten.binary_cross_entropy_backward.default": 4,
}
RULES: RuleTable = {
    **{name: loss(position) for name, position in REDUCTION_AT.items()},
    **{name: loss_backward(position) for name, position in BACKWARD_REDUCTION_AT.items()},
}
