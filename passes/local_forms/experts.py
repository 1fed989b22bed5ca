"""Experts and groups on shards: which of them a rank has, which of the rows, and who adds the bias of the outputs.

Where tokens and experts are cut by the same axes, tokens go to their experts by all-to-all, one axis after the other,
and what was made of them comes back the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import fx

from autopar.ops.dispatch import packed_row
from autopar.passes.local_call import WORK_SHARE, LocalCall, LocalForm, LocalValue, value_of
from autopar.passes.observed import EXPERT_COUNT, ExpertCount
from autopar.passes.renumber_experts import EXPERT_LAYER, FIRST, ExpertLayer
from autopar.sharding.layout import REPLICATE, Layout, shard_dim
from autopar.sharding.rules.experts import (
    ALL_TO_ALL,
    DOWN_BIAS,
    INDEX,
    INSIDE,
    OWN_EXPERTS,
    OWN_ROWS,
    UP,
)

aten = torch.ops.aten
ops = torch.ops.autopar
COUNTS = torch.ops._c10d_functional.all_to_all_single.default


@dataclass(frozen=True)
class Trip:
    """Tokens sent along one axis: which, how many to each rank and from each, and the index that they had."""

    token: fx.Node
    sent: fx.Node
    coming: fx.Node
    index: fx.Node
    group: str


@dataclass(frozen=True)
class Kept:
    """What the forward of a layer leaves for its backward: its trips, its arguments on this rank, and the arguments of
    the activation."""

    trips: tuple[Trip, ...]
    args: tuple[Any, ...]
    hidden: fx.Node


def experts(local: LocalCall) -> LocalValue:
    """(x, index, scores, ...) -> the result."""
    args = list(local.args)
    if local.build.meta.get("phase") != "backward" and "key" in local.build.meta:
        _count(local, args[INDEX], args[FIRST])
    _name_layer(local, INDEX)
    trips = _gone(local, 0, args)
    _set_own(local, 0, args, trips)
    share = _share(local, trips, args[INDEX])
    if local.keeps and local.keeps not in local.build.kept:
        expected = math.ceil(value_of(args[INDEX]).numel() * share)
        both = local.build.op(ops.experts_keeping.default, *args, expected)
        node, hidden = local.output(both, 0), local.output(both, 1)
        local.build.kept[local.keeps] = Kept(tuple(trips), tuple(args), hidden)
    else:
        both = node = local.build.op(local.call.target, *args)
    both.meta[WORK_SHARE] = share
    return _returned(local, trips, [node])[0]


def experts_backward(local: LocalCall) -> LocalValue:
    """(grad, x, index, scores, ...) -> the gradients. What the forward kept is not sent and not computed again."""
    args = list(local.args)
    _name_layer(local, 1 + INDEX)
    kept: Kept | None = local.build.kept.get(local.keeps)
    if kept is not None and kept.trips:
        trips = list(kept.trips)
        for trip in trips:
            args[:1] = _sent(local, trip, args[:1])
        args[1 : 1 + UP] = kept.args[:UP]
    else:
        trips = _gone(local, 1, args)
    _set_own(local, 1, args, trips)
    if kept is not None:
        node = local.build.op(ops.experts_backward_kept.default, *args, kept.hidden)
    else:
        node = local.build.op(local.call.target, *args)
    node.meta[WORK_SHARE] = _share(local, trips, args[1 + INDEX])
    results = [local.output(node, number) for number in range(len(local.call.outputs))]
    by_token = 1 + bool(local.args[-1][1])  # the gradient of x, and that of the scores where it is wanted
    return (*_returned(local, trips, results[:by_token]), *results[by_token:])


def _gone(local: LocalCall, start: int, args: list[Any]) -> list[Trip]:
    """The trips that the tokens make; what goes with them takes its place in `args`, whose layer begins at `start`."""
    trips: list[Trip] = []
    for axis in local.axes_with(ALL_TO_ALL):
        trips.append(_trip(local, axis, args[start + INDEX], args[start + FIRST]))
        args[: start + UP] = _sent(local, trips[-1], args[: start + UP])
    return trips


def _set_own(local: LocalCall, start: int, args: list[Any], trips: Sequence[Trip]) -> None:
    """From which number on this rank's experts are, and whether it adds the bias of the outputs."""
    if local.axes_with(OWN_EXPERTS) or trips:
        args[start + FIRST] += local.input_chunk(_up(local))[0][0]
    if any(local.geometry.coordinates[axis] for axis in local.axes_with(INSIDE)):
        args[start + DOWN_BIAS] = None


def _count(local: LocalCall, index: fx.Node, first: int) -> None:
    """How often this rank's tokens choose each expert, whoever holds it."""
    number = _up(local)
    shape, geometry = local.call.inputs[number].shape, local.geometry
    node = local.build.op(ops.expert_counts.default, index, first, shape[0])
    axes = tuple(axis for axis, item in enumerate(local.strategy.inputs[INDEX]) if shard_dim(item) is not None)
    holders = [
        range(ranks) if shard_dim(item) == 0 else (0,)
        for item, ranks in zip(local.strategy.inputs[number], geometry.mesh_shape, strict=True)
    ]
    layout = local.strategy.inputs[number]
    chunks = [replace(geometry, coordinates=there).chunk(shape, layout) for there in product(*holders)]
    spans = tuple((starts[0], starts[0] + lengths[0]) for starts, lengths in chunks)
    path = local.build.meta["key"].rpartition("/")[0]
    node.meta[EXPERT_COUNT] = ExpertCount(path, axes, spans, _cut_axes(local, number))


def _name_layer(local: LocalCall, index: int) -> None:
    """Let all that is emitted from here on say of which layer it is, unless the op is of no model. `index`: the number
    of the argument with the chosen experts."""
    key = local.build.meta.get("key")
    if key is not None:
        path, tokens = key.rpartition("/")[0], _cut_axes(local, index)
        layer = ExpertLayer(path, local.args[index].name, tokens, _cut_axes(local, _up(local)))
        local.build.meta = {**local.build.meta, EXPERT_LAYER: layer}


def _cut_axes(local: LocalCall, number: int) -> tuple[int, ...]:
    """The mesh axes along which ranks have other rows of a tensor input."""
    pairs = zip(local.strategy.inputs[number], local.geometry.mesh_shape, strict=True)
    return tuple(axis for axis, (item, ranks) in enumerate(pairs) if shard_dim(item) == 0 and ranks > 1)


def _up(local: LocalCall) -> int:
    """The number of the tensor input that holds the experts' first matrices."""
    return next(index for index, spec in enumerate(local.call.inputs) if len(spec.shape) == 4)


def _trip(local: LocalCall, axis: int, index: fx.Node, first: int) -> Trip:
    """Finds who needs which token along `axis`, and tells them how many will come; the backward goes as the forward."""
    build, ranks = local.build, local.geometry.mesh_shape[axis]
    spans = [_held(local, axis, rank) for rank in range(ranks)]
    starts, ends = [first + start for start, _ in spans], [first + start + length for start, length in spans]
    group = local.geometry.group_names[axis]
    known = _known_trip(local, (index, starts, ends), group)
    if known is not None:
        return known
    found = build.op(ops.expert_ranks.default, index, starts, ends)
    token, sent = local.output(found, 0), local.output(found, 1)
    coming = build.collective(COUNTS, sent, (ranks,), [1] * ranks, [1] * ranks, group)
    return Trip(token, sent, coming, index, group)


def _known_trip(local: LocalCall, args: tuple[fx.Node, list[int], list[int]], group: str) -> Trip | None:
    """The trip of an earlier op of the same layer, by the same routing over the same ranks."""
    index = args[0]
    for found in index.users:
        same = found.target == ops.expert_ranks.default and found.args == args
        if same and found.meta.get(EXPERT_LAYER) == local.build.meta.get(EXPERT_LAYER):
            token, sent = found.users
            started = next(user for user in sent.users if user.target == COUNTS)
            if started.args[-1] == group:
                return Trip(token, sent, next(iter(started.users)), index, group)
    return None


def _held(local: LocalCall, axis: int, rank: int) -> tuple[int, int]:
    """(first, count) of the experts that `rank` of `axis` holds, or passes tokens on to along later axes."""
    later = [other for other in local.axes_with(ALL_TO_ALL) if other > axis]
    end = later[0] if later else len(local.geometry.mesh_shape)
    layout = local.strategy.inputs[_up(local)]
    reached: Layout = tuple(REPLICATE if other >= end else item for other, item in enumerate(layout))
    here = local.geometry.coordinates
    there = (*here[:axis], rank, *here[axis + 1 :])
    geometry = replace(local.geometry, coordinates=there)
    starts, lengths = geometry.chunk(local.call.inputs[_up(local)].shape, reached)
    return starts[0], lengths[0]


def _travel(
    local: LocalCall, packed: fx.Node, like: Sequence[fx.Node], counts: tuple[fx.Node, fx.Node], group: str
) -> list[fx.Node]:
    """Rows of bytes to the ranks of a group, and theirs as tensors like `like`; counts of what comes and what goes.

    A tensor alone goes as it is.
    """
    build, values = local.build, [value_of(node) for node in like]
    received = build.collective(ops.all_to_all_rows.default, packed, value_of(packed).shape, *counts, group)
    if packed is like[0]:
        return [received]
    starts, _ = packed_row([value.dtype for value in values], [value.shape[1] for value in values])
    ends = [start + value.shape[1] * value.element_size() for start, value in zip(starts, values, strict=True)]
    columns = [build.op(aten.slice.Tensor, received, 1, start, end) for start, end in zip(starts, ends, strict=True)]
    return [build.op(aten.view.dtype, part, value.dtype) for part, value in zip(columns, values, strict=True)]


def _sent(local: LocalCall, trip: Trip, tensors: Sequence[fx.Node]) -> list[fx.Node]:
    """The rows of all ranks that this rank has experts for, from its own tensors by token."""
    packed = local.build.op(ops.pack_rows.default, list(tensors), trip.token)
    return _travel(local, packed, tensors, (trip.coming, trip.sent), trip.group)


def _returned(local: LocalCall, trips: Sequence[Trip], results: list[fx.Node]) -> list[fx.Node]:
    """The results of this rank's own tokens, from those of the rows that it was sent."""
    for trip in reversed(trips):
        packed = local.build.op(ops.pack_rows.default, results, None) if len(results) > 1 else results[0]
        back = _travel(local, packed, results, (trip.sent, trip.coming), trip.group)
        results = [local.build.op(ops.sum_by_token.default, part, trip.token, trip.sent, trip.index) for part in back]
    return results


def _share(local: LocalCall, trips: Sequence[Trip], index: fx.Node) -> float:
    """Of the rows that the op is given, it works on the choices of its own experts alone: on so large a part."""
    ways = prod(local.geometry.mesh_shape[axis] for axis in local.axes_with(OWN_EXPERTS))
    before, met = (value_of(item).shape[0] for item in (trips[0].index if trips else index, index))
    return float(before / max(1, met * ways))


def local_ends(local: LocalCall) -> fx.Node:
    """Where the groups end within this rank's rows."""
    (start, *_), (length, *_) = local.input_chunk(0)
    ends = local.build.op(aten.sub.Tensor, local.args[2], start)
    return local.build.op(aten.clamp.default, ends, 0, length)


def grouped_mm(local: LocalCall) -> LocalValue:
    """(rows, matrices, ends, first)."""
    rows, matrices, ends, first = local.args
    if local.axes_with(OWN_ROWS):
        ends = local_ends(local)
    return local.build.op(local.call.target, rows, matrices, ends, first + local.input_chunk(1)[0][0])


def grouped_outer(local: LocalCall) -> LocalValue:
    """(left, right, ends, first, count)."""
    left, right, ends, first, _ = local.args
    if local.axes_with(OWN_ROWS):
        ends = local_ends(local)
    starts, lengths = local.output_chunk()
    return local.build.op(local.call.target, left, right, ends, first + starts[0], lengths[0])


FORMS: Mapping[str, LocalForm] = {
    "autopar.grouped_mm.default": grouped_mm,
    "autopar.grouped_outer.default": grouped_outer,
    "autopar.experts.default": experts,
    "autopar.experts_backward.default": experts_backward,
}
