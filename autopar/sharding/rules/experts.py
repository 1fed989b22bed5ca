"""A layer of experts: cut by tokens, by experts, by both at once, inside every expert, by its outputs, or by the
choices of a token. By both at once, tokens go by all-to-all to the ranks that have their experts, and results back.

Products in groups: by rows, by groups, along the rows and columns of the matrices.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.sharding.layout import REPLICATE
from autopar.sharding.op_call import OpCall
from autopar.sharding.rule import Dispatch, Rule
from autopar.sharding.rules.placing import SUM, RuleTable, place, required_tensor_at

OWN_EXPERTS = "own experts"  # a rank's experts are numbered from the first of its shard
ALL_TO_ALL = "all-to-all"  # tokens and experts are cut: tokens go to their experts, and what these make comes back
INSIDE = "inside experts"  # the hidden dim of every expert is cut: the bias of its outputs is added on one rank
OWN_ROWS = "own rows"  # where the groups end is counted from a rank's first row
X, INDEX, SCORES, UP, UP_BIAS, DOWN, DOWN_BIAS = range(7)  # arguments of the forward; the backward has one before them
Placed = dict[int, Placement]
TOKENS = (X, INDEX, SCORES)
WEIGHTS = (UP, UP_BIAS, DOWN, DOWN_BIAS)


def _ways(call: OpCall, first: int) -> Iterator[tuple[str, Placed]]:
    """(form, placements by argument of the forward) of every way to cut the layer."""
    yield "tokens", dict.fromkeys(TOKENS, Shard(0))
    yield OWN_EXPERTS, dict.fromkeys(WEIGHTS, Shard(0))
    yield ALL_TO_ALL, dict.fromkeys((*TOKENS, *WEIGHTS), Shard(0))
    yield INSIDE, {UP: Shard(2), UP_BIAS: Shard(2), DOWN: Shard(2)}
    yield "outputs", {DOWN: Shard(1), DOWN_BIAS: Shard(1)}
    if required_tensor_at(call, first + INDEX).shape[1] > 1:
        yield "choices", {INDEX: Shard(1), SCORES: Shard(1)}


BY_EXPERTS = (OWN_EXPERTS, ALL_TO_ALL)  # any number of experts over any number of ranks
FORMS = (OWN_EXPERTS, ALL_TO_ALL, INSIDE)
BY_TOKENS = ("tokens", ALL_TO_ALL)


def _dispatch(call: OpCall, way: str, first: int) -> Dispatch | None:
    """What a token takes along, and what comes back: its result, or the gradients of it and of its scores.

    In the backward the gradient alone travels: what went with it in the forward is kept there (`kept_experts`).
    """
    if way != ALL_TO_ALL:
        return None
    index, scores = (required_tensor_at(call, first + argument) for argument in (INDEX, SCORES))
    sent = call.inputs[:1] if first else call.inputs[: SCORES + 1]
    returned = [spec for spec in call.outputs[: 1 + first] if spec is not None]
    row_bytes, returned_bytes = (
        sum(spec.nbytes // max(1, scores.shape[0]) for spec in side) for side in (sent, returned)
    )
    return Dispatch(tuple(range(first + SCORES + 1)), index.shape[1], row_bytes, returned_bytes)


def experts(call: OpCall) -> Iterator[Rule]:
    """(x, index, scores, up, up_bias, down, down_bias, activation, first) -> [T, O]."""
    results = {**dict.fromkeys(BY_TOKENS, Shard(0)), "outputs": Shard(1)}
    for way, placed in _ways(call, 0):
        form = way if way in FORMS else ""
        yield place(
            call, placed, results.get(way, SUM), form=form, dispatch=_dispatch(call, way, 0), short=way in BY_EXPERTS
        )


def experts_backward(call: OpCall) -> Iterator[Rule]:
    """(grad, x, index, scores, up, up_bias, down, down_bias, ...) -> (x, scores, up, up_bias, down, down_bias).

    A gradient is cut as its tensor is where that is cut; of the others each rank has an addend, but for the bias of the
    outputs where every rank has the whole of what it is a sum of.
    """
    gradients = (X, SCORES, UP, UP_BIAS, DOWN, DOWN_BIAS)
    grads_of_grad = {**dict.fromkeys(BY_TOKENS, Shard(0)), "outputs": Shard(1)}
    wanted = call.args[-1]
    for way, placed in _ways(call, 1):
        outputs = [placed.get(argument, SUM) for argument in gradients]
        if way == INSIDE:
            outputs[-1] = REPLICATE
        inputs = {argument + 1: item for argument, item in placed.items()}
        inputs[0] = grads_of_grad.get(way, REPLICATE)
        form = way if way in FORMS else ""
        yield place(
            call, inputs, _wanted(outputs, wanted), form=form, dispatch=_dispatch(call, way, 1), short=way in BY_EXPERTS
        )
    yield place(call, {0: SUM}, _wanted([SUM] * len(gradients), wanted))


def _wanted(outputs: list[Placement], wanted: tuple[bool, ...]) -> tuple[Placement, ...]:
    """Results that are not wanted are empty, the same on every rank; the first is always there."""
    pairs = zip(outputs[1:], wanted[1:], strict=True)
    return (outputs[0], *(item if want else REPLICATE for item, want in pairs))


def grouped_mm(call: OpCall) -> Iterator[Rule]:
    """(rows [R, K], matrices [E, K, N], ends, first) -> [R, N]."""
    yield place(call, {0: Shard(0)}, Shard(0), form=OWN_ROWS)
    yield place(call, {1: Shard(0)}, SUM, form=OWN_EXPERTS)
    yield place(call, {0: Shard(1), 1: Shard(1)}, SUM)
    yield place(call, {1: Shard(2)}, Shard(1))
    yield place(call, {0: SUM}, SUM)


def grouped_outer(call: OpCall) -> Iterator[Rule]:
    """(left [R, M], right [R, N], ends, first, count) -> [E, M, N]."""
    yield place(call, {0: Shard(0), 1: Shard(0)}, SUM, form=OWN_ROWS)
    yield place(call, {}, Shard(0), form=OWN_EXPERTS)
    yield place(call, {0: Shard(1)}, Shard(1))
    yield place(call, {1: Shard(1)}, Shard(2))
    yield place(call, {1: SUM}, SUM)


RULES: RuleTable = {
    "autopar.grouped_mm.default": grouped_mm,
    "autopar.grouped_outer.default": grouped_outer,
    "autopar.experts.default": experts,
    "autopar.experts_backward.default": experts_backward,
}
