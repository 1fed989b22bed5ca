"""The mesh that is planned for: virtual (`autopar.Mesh`), or a view of a live `DeviceMesh`."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.cost_models.hardware import HardwareProfile, load_profile, profile_for_device_name
from autopar.errors import HardwareProfileError, MeshError


@dataclass(frozen=True, init=False)
class Mesh:
    """An n-d array of ranks with a hardware profile; it needs no process group, so that planning runs anywhere.

    `shape`: ranks per axis, the last axis fastest. `hardware`: a shipped profile's name, a path, or a profile.

    >>> Mesh((2, 4), ("dp", "tp"), hardware="h100").size
    8
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    profile: HardwareProfile
    device_type: str = "cpu"

    def __init__(
        self,
        shape: int | Sequence[int],
        axis_names: Sequence[str] | None = None,
        *,
        hardware: str | Path | HardwareProfile = "h100",
        device_type: str = "cpu",
    ) -> None:
        sizes = _sizes(shape)
        if not sizes or any(size < 1 for size in sizes):
            raise MeshError(f"mesh shape {tuple(sizes)} has an axis without ranks", fix="give one size >= 1 per axis")
        names = tuple(axis_names) if axis_names else tuple(f"axis{index}" for index in range(len(sizes)))
        if len(names) != len(sizes) or len(set(names)) != len(names):
            raise MeshError(f"axis names {names} do not name the {len(sizes)} axes one by one")
        profile = _profile(hardware)
        for what in ("rank_speeds", "rank_memory_bytes"):
            if len(getattr(profile, what)) > math.prod(sizes):
                raise HardwareProfileError(
                    f"{profile.name} has {len(getattr(profile, what))} {what}, and the mesh {sizes} has fewer ranks",
                    fix="list those of the ranks of this mesh, in rank order, the last axis fastest",
                )
        for field, value in (
            ("shape", sizes),
            ("axis_names", names),
            ("profile", profile),
            ("device_type", device_type),
        ):
            object.__setattr__(self, field, value)

    @property
    def size(self) -> int:
        """How many ranks."""
        return math.prod(self.shape)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where a rank stands in the mesh."""
        found = []
        for size in reversed(self.shape):
            rank, place = divmod(rank, size)
            found.append(place)
        return tuple(reversed(found))


@dataclass(frozen=True, init=False)
class Devices:
    """So many devices that are in no mesh yet: `make_plan` tries the shapes that suit the hardware.

    >>> Devices(8, hardware="h100").count
    8
    """

    count: int
    profile: HardwareProfile
    device_type: str = "cpu"

    def __init__(
        self, count: int, *, hardware: str | Path | HardwareProfile = "h100", device_type: str = "cpu"
    ) -> None:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise MeshError(f"{count!r} devices are none", fix="give how many there are, as 8")
        for field, value in (("count", count), ("profile", _profile(hardware)), ("device_type", device_type)):
            object.__setattr__(self, field, value)


def as_mesh(
    mesh: Mesh | DeviceMesh | Sequence[int] | int, hardware: str | Path | HardwareProfile | None = None
) -> Mesh:
    """The mesh to plan for. `hardware` overrides the profile; a `DeviceMesh` picks its own by device name."""
    if isinstance(mesh, Mesh):
        return mesh if hardware is None else Mesh(mesh.shape, mesh.axis_names, hardware=hardware)
    if isinstance(mesh, DeviceMesh):
        profile = _profile(hardware) if hardware is not None else _profile_of(mesh.device_type)
        return Mesh(tuple(mesh.shape), mesh.mesh_dim_names, hardware=profile, device_type=mesh.device_type)
    return Mesh(mesh, hardware=hardware or "h100")


def _sizes(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(size) for size in ((shape,) if isinstance(shape, int) else shape))
    except TypeError as error:
        raise MeshError(f"mesh {shape!r} has no shape", fix="give sizes by axis, as (2, 4), or a DeviceMesh") from error


def _profile(hardware: str | Path | HardwareProfile) -> HardwareProfile:
    if not isinstance(hardware, (str, Path, HardwareProfile)):
        raise HardwareProfileError(
            f"hardware is a {type(hardware).__name__}", fix="give a shipped profile's name, a path, or a profile"
        )
    return load_profile(hardware)


def _profile_of(device_type: str) -> HardwareProfile:
    if device_type == "cpu":
        return load_profile("cpu")
    name = torch.get_device_module(device_type).get_device_name()
    profile = profile_for_device_name(name)
    if profile is None:
        warnings.warn(
            f"no hardware profile for {name!r}: planning with that of an H100; pass hardware=, or run "
            "`python -m autopar calibrate`",
            stacklevel=3,
        )
        return load_profile("h100")
    return profile
