"""Ops that slide a window over sharded spatial dims: called on this rank's inputs with their halo."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from autopar.passes.halos import Halos
from autopar.passes.local_call import GraphBuilder, LocalCall, LocalForm, LocalValue
from autopar.sharding.rules.images import SPATIAL

aten = torch.ops.aten


def one_result(local: LocalCall) -> LocalValue:
    """`avg_pool`, (self, ...)."""
    halos = Halos(local)
    return halos.kept(local.build.op(local.call.target, halos.fetched(local.args[0]), *local.args[1:], **local.kwargs))


def one_result_backward(local: LocalCall) -> LocalValue:
    """(grad, self, ...), of self no more than the sizes."""
    halos, (grad, source, *rest) = Halos(local), local.args
    return halos.returned(local.build.op(local.call.target, halos.widened(grad), halos.blank(source), *rest))


def maximum(local: LocalCall) -> LocalValue:
    """(self, ...) -> (out, indices), which count the elements of the input's plane."""
    halos = Halos(local)
    args, spatial = list(local.args), spatial_dims(local)
    if local.call.name.startswith("aten.adaptive"):
        args[1] = halos.output_sizes(local.output_chunk()[1])[-spatial:]
    node = local.build.op(local.call.target, halos.fetched(args[0]), *args[1:], **local.kwargs)
    out, indices = (halos.kept(local.output(node, index)) for index in range(2))
    return out, renumbered(local.build, indices, *planes(local, halos, spatial))


def maximum_backward(local: LocalCall) -> LocalValue:
    """(grad, self, ..., indices)."""
    halos, (grad, source, *rest, indices) = Halos(local), local.args
    called, whole, starts = planes(local, halos, spatial_dims(local))
    own = renumbered(local.build, indices, whole, called, [-start for start in starts])
    args = halos.widened(grad), halos.blank(source), *rest, halos.widened(own)
    return halos.returned(local.build.op(local.call.target, *args))


def adaptive(local: LocalCall) -> LocalValue:
    """`_adaptive_avg_pool`, (self, output_size)."""
    halos = Halos(local)
    sizes = halos.output_sizes(local.output_chunk()[1])[-spatial_dims(local) :]
    return halos.kept(local.build.op(local.call.target, halos.fetched(local.args[0]), sizes))


def interpolated(local: LocalCall) -> LocalValue:
    """(self, output_size, ...)."""
    halos, (source, _, *rest) = Halos(local), local.args
    sizes = halos.output_sizes(local.output_chunk()[1])[-spatial_dims(local) :]
    return halos.kept(local.build.op(local.call.target, halos.fetched(source), sizes, *rest, **local.kwargs))


def interpolated_backward(local: LocalCall) -> LocalValue:
    """(grad, output_size, input_size, ...)."""
    halos, (grad, _, _, *rest) = Halos(local), local.args
    outputs = halos.output_sizes(local.input_chunk(0)[1])[-spatial_dims(local) :]
    inputs = halos.input_sizes(local.output_chunk()[1])
    args = halos.widened(grad), outputs, inputs, *rest
    return halos.returned(local.build.op(local.call.target, *args, **local.kwargs))


def padded(local: LocalCall) -> LocalValue:
    """(self, padding, ...)."""
    halos, (source, amounts, *rest) = Halos(local), local.args
    amounts = own_padding(halos, amounts, source)
    return halos.kept(local.build.op(local.call.target, halos.fetched(source), amounts, *rest, **local.kwargs))


def padded_backward(local: LocalCall) -> LocalValue:
    """(grad, self, padding)."""
    halos, (grad, source, amounts) = Halos(local), local.args
    amounts = own_padding(halos, amounts, source)
    return halos.returned(local.build.op(local.call.target, halos.widened(grad), halos.blank(source), amounts))


def own_padding(halos: Halos, amounts: Sequence[int], source: fx.Node) -> list[int]:
    """What this rank's call pads: before and after the last dim, then the one before it, and so on."""
    own = list(amounts)
    for cut in halos.cuts:
        at = 2 * (source.meta["val"].dim() - 1 - cut.dim)
        own[at : at + 2] = cut.frame.padding
    return own


def spatial_dims(local: LocalCall) -> int:
    """How many of an op's last dims are spatial."""
    return SPATIAL_DIMS[local.call.name]


def planes(local: LocalCall, halos: Halos, spatial: int) -> tuple[list[int], list[int], list[int]]:
    """The spatial sizes of this rank's call and of the whole input, and where in it the call's input starts."""
    index = 1 if "_backward" in local.call.name else 0
    called = halos.input_sizes(local.input_chunk(index)[1])
    starts = [0] * len(called)
    for cut in halos.cuts:
        starts[cut.dim] = cut.frame.start
    return called[-spatial:], list(local.call.inputs[index].shape[-spatial:]), starts[-spatial:]


def renumbered(
    build: GraphBuilder, index: fx.Node, source: Sequence[int], target: Sequence[int], starts: Sequence[int]
) -> fx.Node:
    """Numbers of elements of a plane of sizes `source` as numbers in one of sizes `target` that has it at `starts`."""
    if source == target and not any(starts):
        return index
    if source[1:] == target[1:]:
        return build.op(aten.add.Scalar, index, starts[0] * math.prod(source[1:]))
    places, rest = list[fx.Node](), index
    for size in reversed(source):
        places.append(build.op(aten.remainder.Scalar, rest, size))
        rest = build.op(aten.div.Scalar_mode, rest, size, rounding_mode="floor")
    number, width = None, 1
    for place, size, start in zip(places, reversed(target), reversed(starts), strict=True):
        own = build.op(aten.mul.Scalar, build.op(aten.add.Scalar, place, start), width)
        number = own if number is None else build.op(aten.add.Tensor, number, own)
        width *= size
    assert number is not None
    return number


FAMILIES: tuple[tuple[str, LocalForm, LocalForm], ...] = (
    ("max_pool", maximum, maximum_backward),
    ("avg_pool", one_result, one_result_backward),
    ("_adaptive_avg_pool", adaptive, one_result_backward),
    ("adaptive_max_pool", maximum, maximum_backward),
    ("reflection_pad", padded, padded_backward),
    ("replication_pad", padded, padded_backward),
    ("upsample", interpolated, interpolated_backward),
    ("_upsample", interpolated, interpolated_backward),
)
"""Ops by how their names begin, with the forms of forward and backward."""

SPATIAL_DIMS: Mapping[str, int] = {
    f"aten.{name}.default": count for count, line in SPATIAL.items() for name in line.split()
}


def _forms() -> dict[str, LocalForm]:
    forms = {}
    for op in SPATIAL_DIMS:
        name = op.split(".")[1]
        for start, forward, backward in FAMILIES:
            if name.startswith(start):
                forms[op] = backward if "_backward" in name else forward
    return forms


FORMS: Mapping[str, LocalForm] = {**_forms(), "aten.constant_pad_nd.default": padded}
