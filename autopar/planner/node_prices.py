"""Seconds of the nodes of emitted graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.passes.collectives import collective_kind, collective_splits, is_collective, is_wait
from autopar.passes.copies import is_copy, is_copy_wait
from autopar.passes.local_call import WORK_SHARE, RankGeometry
from autopar.passes.storages import view_base
from autopar.planner.prices import Prices
from autopar.runtime.virtual_groups import virtual_group_names
from autopar.sharding.assignment import is_getitem
from autopar.sharding.op_call import call_of, walk

NEIGHBOURS = 2  # a rank of a ring has one on either side


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective of an emitted graph. `bytes_` as `Step.bytes` counts them: of the full tensor over the group."""

    kind: str
    axis: int
    bytes_: int


def computes(node: fx.Node) -> bool:
    """Whether a node runs a kernel: no collective, no copy to the host or back, no view, no pick of one of several
    outputs."""
    if node.op != "call_function" or is_getitem(node) or is_collective(node) or is_wait(node):
        return False
    if is_copy(node) or is_copy_wait(node):
        return False
    return view_base(node) is None


def is_view(node: fx.Node) -> bool:
    """Whether a node runs on the host alone: it makes a view, or picks one of several outputs."""
    if node.op != "call_function" or is_collective(node) or is_wait(node) or is_copy(node) or is_copy_wait(node):
        return False
    return is_getitem(node) or view_base(node) is not None


def compute_seconds(node: fx.Node, prices: Prices) -> float:
    """Seconds of a node that computes: of the part of its rows that it works on, where its local form noted one."""
    share: float = node.meta.get(WORK_SHARE, 1.0)
    return share * prices.local_op(call_of(node))


def collective_call(node: fx.Node, geometry: RankGeometry) -> CollectiveCall:
    """What a node that starts a collective does, and over which axis."""
    kind = collective_kind(node)
    axis = next(index for index, name in enumerate(geometry.group_names) if name in node.args)
    value = node if kind == "all_gather" else node.all_input_nodes[0]
    if kind == "all_to_all" and collective_splits(node) is not None:
        return exchange_call(node, axis, geometry.coordinates[axis])
    return CollectiveCall(kind, axis, value_bytes(value.meta["val"]))


def exchange_call(node: fx.Node, axis: int, here: int) -> CollectiveCall:
    """An all-to-all, or what it is where a rank keeps its own share to itself: messages to a neighbour or two."""
    splits = collective_splits(node)
    assert splits is not None
    source, (coming, sent) = node.all_input_nodes[0], splits
    own, arriving = (value_bytes(value.meta["val"]) for value in (source, node))
    if sent[here]:  # in equal shares, the buffer holds what stays here too
        return CollectiveCall("all_to_all", axis, own)
    messages = max(sum(count > 0 for count in counts) for counts in (coming, sent))
    bytes_ = max(own, arriving)
    if messages <= NEIGHBOURS:
        return CollectiveCall("send", axis, bytes_)
    return CollectiveCall("all_to_all", axis, bytes_ * len(sent) // (len(sent) - 1))


def copied_bytes(call: CollectiveCall) -> int:
    """Bytes that a functional collective copies before it starts: all_reduce works on a copy of its input."""
    return call.bytes_ if call.kind == "all_reduce" else 0


def copied_over_bytes(node: fx.Node) -> int:
    """Bytes that a copy to the host or back carries."""
    return value_bytes(node.meta["val"])


def node_seconds(node: fx.Node, prices: Prices, geometry: RankGeometry) -> float:
    """Seconds of any node, nothing hidden."""
    if is_collective(node):
        call = collective_call(node, geometry)
        copied = copied_bytes(call)
        return prices.collective(call.kind, call.bytes_, call.axis) + (prices.copy(copied) if copied else 0.0)
    if is_copy(node):
        return prices.host_copy(copied_over_bytes(node))
    if computes(node):
        return compute_seconds(node, prices)
    return prices.device.view_s if is_view(node) else 0.0


def origin_geometry(mesh_shape: tuple[int, ...], device: str = "cpu") -> RankGeometry:
    """The rank at the origin, which holds the largest shards, in virtual groups."""
    return virtual_geometry((0,) * len(mesh_shape), mesh_shape, device)


def virtual_geometry(coordinates: tuple[int, ...], mesh_shape: tuple[int, ...], device: str = "cpu") -> RankGeometry:
    """The rank at `coordinates`, in virtual groups."""
    return RankGeometry(mesh_shape, coordinates, virtual_group_names(coordinates, mesh_shape), device)


def value_bytes(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in walk(value) if isinstance(leaf, torch.Tensor))
