"""Names of virtual process groups: the name lists the member ranks, so that one process can play all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from autopar.errors import UnknownGroupError

PREFIX = "autopar/axis"


def rank_of(coordinates: Sequence[int], mesh_shape: Sequence[int]) -> int:
    """The rank at `coordinates` of a mesh whose ranks are counted in row-major order."""
    rank = 0
    for coordinate, size in zip(coordinates, mesh_shape, strict=True):
        rank = rank * size + coordinate
    return rank


def coordinates_of(rank: int, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """The inverse of `rank_of`."""
    coordinates = []
    for size in reversed(mesh_shape):
        rank, coordinate = divmod(rank, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


def every_coordinates(mesh_shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The coordinates of all ranks, in rank order."""
    return tuple(itertools.product(*map(range, mesh_shape)))


def virtual_group_name(axis: int, coordinates: Sequence[int], mesh_shape: Sequence[int]) -> str:
    """The name of the group along mesh axis `axis` that holds the rank at `coordinates`: `autopar/axis1/4,5,6,7`."""
    stride = math.prod(mesh_shape[axis + 1 :])
    first = rank_of(coordinates, mesh_shape) - stride * coordinates[axis]
    members = range(first, first + stride * mesh_shape[axis], stride)
    return f"{PREFIX}{axis}/{','.join(map(str, members))}"


def virtual_group_names(coordinates: Sequence[int], mesh_shape: Sequence[int]) -> tuple[str, ...]:
    """The names of the groups of the rank at `coordinates`, one for each mesh axis."""
    return tuple(virtual_group_name(axis, coordinates, mesh_shape) for axis in range(len(mesh_shape)))


def group_members(name: str) -> tuple[int, ...]:
    """The ranks that a virtual group's name lists, in order."""
    if not name.startswith(PREFIX):
        raise UnknownGroupError(
            f"{name!r} is not the name of a virtual group", fix="emit the graphs with virtual_group_name's names"
        )
    return tuple(int(rank) for rank in name.rpartition("/")[2].split(","))
