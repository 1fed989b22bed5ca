"""What `place_experts` is given, read and checked once: a frozen value of arrays and counts."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from autopar.errors import ExpertPlacementError

Array = npt.NDArray[Any]


class ShapedMesh(Protocol):
    """An `autopar.Mesh` or a `DeviceMesh`: sizes by axis, the last axis fastest."""

    @property
    def shape(self) -> Sequence[int]: ...


AnyMesh = ShapedMesh | Sequence[int] | int


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices in nodes of equal size; device d stands in node d // devices_per_node."""

    devices: int
    devices_per_node: int

    @property
    def nodes(self) -> int:
        return self.devices // self.devices_per_node

    def node_of(self) -> Array:
        """int64 [devices]."""
        return np.arange(self.devices) // self.devices_per_node


@dataclass(frozen=True, slots=True)
class Question:
    """`load` float64 [layers, experts]; `affinity` [layers - 1, experts, experts]; `current` [layers, devices, any]."""

    load: Array
    cluster: Cluster
    slots: int  # per device and layer
    affinity: Array | None
    current: Array | None

    @property
    def replicas(self) -> int:
        return self.slots * self.cluster.devices


def read_question(
    load: Any, mesh: AnyMesh, replicas: int | None, affinity: Any, current: Any, devices_per_node: int | None
) -> Question:
    """Check everything, or raise ExpertPlacementError."""
    for name, value in (("replicas", replicas), ("devices_per_node", devices_per_node)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise ExpertPlacementError(f"{name} is {value!r}: no whole number", fix="give an int")
    loads = read_load(load)
    cluster = read_cluster(mesh, devices_per_node)
    experts = loads.shape[1]
    slots = slots_per_device(experts, cluster.devices, replicas)
    links = None if affinity is None else read_affinity(affinity, loads.shape)
    held = None if current is None else read_current(current, loads.shape, cluster.devices)
    return Question(loads, cluster, slots, links, held)


def read_load(load: Any) -> Array:
    """float64 [layers, experts]; one row, [experts], is one layer."""
    loads = _numbers(load, "load")
    if loads.ndim == 1:
        loads = loads[None]
    if loads.ndim != 2 or 0 in loads.shape:
        raise ExpertPlacementError(f"load has the shape {loads.shape}", fix="give [layers, experts]")
    return loads


def _numbers(values: Any, name: str) -> Array:
    """float64, finite, none negative; a tensor of any dtype and device that holds numbers, too."""
    try:
        held = values.detach().double().cpu() if hasattr(values, "detach") else values
        array = np.asarray(held, dtype=np.float64)
    except (TypeError, ValueError, NotImplementedError) as error:  # the last: a meta tensor has no values
        raise ExpertPlacementError(f"{name} is no array of numbers: {error}", fix="give rows of one length") from error
    for what, wrong in (("not a finite number", ~np.isfinite(array)), ("negative", array < 0)):
        if wrong.any():
            where = tuple(int(index) for index in np.argwhere(wrong)[0])
            raise ExpertPlacementError(
                f"{name}{list(where)} is {array[where]}: {what}", fix="give counts of tokens, or shares of them"
            )
    return array


def read_cluster(mesh: AnyMesh, devices_per_node: int | None) -> Cluster:
    """The devices of a mesh. A node is what the mesh's hardware profile says, else the ranks along the last axis.

    One axis without a profile is one node; so is a mesh smaller than the profile's node.
    """
    shape: Any = getattr(mesh, "shape", mesh)
    try:
        sizes = [operator.index(size) for size in ((shape,) if isinstance(shape, int) else shape)]
    except TypeError as error:
        raise ExpertPlacementError(f"mesh {mesh!r} has no shape", fix="give sizes by axis, as (8, 8)") from error
    if not sizes or min(sizes) < 1:
        raise ExpertPlacementError(f"mesh shape {tuple(sizes)} has an axis without devices", fix="give sizes >= 1")
    devices = math.prod(sizes)
    if devices_per_node is None:
        of_profile = getattr(getattr(mesh, "profile", None), "ranks_per_node", None)
        devices_per_node = sizes[-1] if of_profile is None else min(of_profile, devices)
    if devices_per_node < 1 or devices % devices_per_node:
        raise ExpertPlacementError(
            f"{devices} devices do not make nodes of {devices_per_node}", fix="give devices_per_node, a divisor of them"
        )
    return Cluster(devices, devices_per_node)


def slots_per_device(experts: int, devices: int, replicas: int | None) -> int:
    """Expert slots of a device in one layer; without `replicas`, the fewest that hold all experts."""
    if replicas is None:
        return -(-experts // devices)
    if replicas < experts:
        raise ExpertPlacementError(
            f"{replicas} replicas are fewer than the {experts} experts", fix="every expert needs a slot"
        )
    if replicas % devices:
        below = replicas // devices * devices
        near = [count for count in (below, below + devices) if count >= experts]
        raise ExpertPlacementError(
            f"{replicas} replicas do not divide over {devices} devices",
            fix=f"every device has equally many slots: use {' or '.join(map(str, near))}",
        )
    return replicas // devices


def read_affinity(affinity: Any, shape: tuple[int, ...]) -> Array:
    """float64 [layers - 1, experts, experts]: tokens with expert i in a layer and expert j in the next."""
    layers, experts = shape
    links = _numbers(affinity, "affinity")
    if links.ndim == 2 and layers == 2:
        links = links[None]
    if links.shape != (layers - 1, experts, experts):
        raise ExpertPlacementError(
            f"affinity has the shape {links.shape}, load {shape}",
            fix=f"give {(layers - 1, experts, experts)}: for each pair of neighbouring layers, tokens by expert in the "
            "first and in the second",
        )
    return links


def read_current(current: Any, shape: tuple[int, ...], devices: int) -> Array:
    """int64 [layers, devices, slots]: the expert in each slot; a `Placement` is read as its assignment."""
    layers, experts = shape
    try:
        given = np.asarray(getattr(current, "assignment", current))
    except ValueError as error:
        raise ExpertPlacementError(f"current is no array: {error}", fix="give [layers, devices, slots]") from error
    if given.ndim != 3 or given.shape[:2] != (layers, devices) or given.dtype.kind not in "iu":
        raise ExpertPlacementError(
            f"current is an array of {given.dtype} of the shape {given.shape}",
            fix=f"give a Placement, or the expert in every slot as integers [{layers}, {devices}, slots]",
        )
    if given.size and (given.min() < 0 or given.max() >= experts):
        raise ExpertPlacementError(f"current names an expert outside of 0 to {experts - 1}")
    return given.astype(np.int64)
