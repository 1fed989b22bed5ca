"""Random tensors on shards: where a shard lies in the full tensor is among their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue


def added(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(left, right, strict=True)]


def random(local: LocalCall) -> LocalValue:
    """(seed, shape, offset, full_shape, ...)."""
    seed, _, offset, *rest = local.args
    start, lengths = local.output_chunk()
    return local.build.op(local.call.target, seed, list(lengths), added(offset, start), *rest)


FORMS: Mapping[str, LocalForm] = {
    "autopar.random_mask.default": random,
    "autopar.random_uniform.default": random,
    "autopar.random_normal.default": random,
    "autopar.random_integers.default": random,
}
