"""Rules: what an op allows on ONE mesh axis, and the compact notation in which most of them are written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.errors import RuleError
from autopar.sharding.layout import REPLICATE
from autopar.sharding.op_call import OpCall
from autopar.sharding.windows import Halo


@dataclass(frozen=True, slots=True)
class Ring:
    """Tensor inputs, by number, that every rank of an axis has in turn: the op runs once on those of each rank.

    `rounds`: how often they go around, their gradients included.
    """

    tensors: tuple[int, ...]
    rounds: int = 1


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Tensor inputs, by number, whose rows go along an axis to the ranks that compute on them, and results come back.

    A row goes once to every rank that holds one of its `choices`. `row_bytes`, `returned_bytes`: of one row, each way.
    """

    tensors: tuple[int, ...]
    choices: int
    row_bytes: int
    returned_bytes: int


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to run an op on one mesh axis: given these input placements, it makes these output placements.

    `form` names a local form other than "call the op on the shards" (a masked lookup, a sum that needs the other
    ranks' maximum, ...); "" is the plain call. Sizes among the arguments are localized in every form.
    `even` demands that every sharded dim divide by the ranks that share it; otherwise trailing shards may be short.
    `short`: shards may be short or empty however few elements there are to share: the price is that of the largest.
    `internal_bytes`: bytes of the full tensors that the form all-reduces on this axis, for pricing.
    `splits`: a count among the arguments (groups of a convolution) that is cut with the tensors, so must divide too.
    `halo`: what the form fetches of other ranks' chunks of the dim that this axis cuts, or returns to them; a dim has
    at most one such axis.
    `ring`: what the form passes from rank to rank along this axis.
    `dispatch`: what the form sends along this axis to where it is computed on.
    `excludes`: a form that no other axis may run beside this one.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    form: str = ""
    even: bool = False
    internal_bytes: int = 0
    splits: int = 0
    halo: Halo | None = None
    ring: Ring | None = None
    dispatch: Dispatch | None = None
    excludes: str = ""
    short: bool = False


def replicate_rule(call: OpCall) -> Rule:
    """The rule that every deterministic op has: full tensors in, full tensors out."""
    return Rule((REPLICATE,) * len(call.inputs), (REPLICATE,) * len(call.outputs))


@lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    if text.count("->") != 1:
        raise RuleError(f"rule {text!r} needs one '->' between inputs and outputs")
    sides = []
    for side in text.split("->"):
        terms = [term.strip() for term in side.split(",")]
        sides.append(tuple(tuple(re.findall(r"[A-Za-z]|_|1", term)) for term in terms))
    return sides[0], sides[1]


def parse_notation(text: str, call: OpCall) -> tuple[Rule, ...]:
    """Rules of a line of named dims, as `mk,kn->mn`.

    One term per tensor input and per tensor output; one letter per dim (spaces between letters are allowed). Sharding
    a letter shards every dim of that name; an output that lacks it is a partial sum. `_` is a dim that is never
    sharded; `1` a dim of size one. Letters of a term that is never sharded on its own: upper case (as `N` in
    `b N -> b N`). The all-replicated rule comes first.
    """
    inputs, outputs = _parse(text)
    _check_ranks(text, call, inputs, outputs)
    letters = sorted({name for term in inputs for name in term if name.islower()})
    split = (Rule(_placements(inputs, name, REPLICATE), _placements(outputs, name, Partial())) for name in letters)
    return (replicate_rule(call), *split)


def _placements(terms: Sequence[tuple[str, ...]], letter: str, absent: Placement) -> tuple[Placement, ...]:
    return tuple(Shard(term.index(letter)) if letter in term else absent for term in terms)


def _check_ranks(
    text: str, call: OpCall, inputs: Sequence[tuple[str, ...]], outputs: Sequence[tuple[str, ...]]
) -> None:
    sides = (("inputs", inputs, call.inputs), ("outputs", outputs, call.outputs))
    for side, terms, specs in sides:
        if len(terms) != len(specs):
            raise RuleError(f"rule {text!r} names {len(terms)} {side}, {call.name} has {len(specs)}")
        for term, spec in zip(terms, specs, strict=True):
            if spec is not None and len(term) != len(spec.shape):
                raise RuleError(f"rule {text!r}: {' '.join(term)!r} has {len(term)} dims, {call.name} has {spec.shape}")
