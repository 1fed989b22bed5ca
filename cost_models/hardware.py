"""What the machine is: devices, links, and how a mesh lies over nodes. Plain numbers, read from JSON profiles.

`load_profile` gives a checked, frozen `HardwareProfile`; `axis_links` says what a collective over each mesh axis sees.
Units are in the names; a rate is in one direction; 1 GB is 10⁹ bytes. Every profile names its sources.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from autopar.cost_models.links import Link, Protocol, link_of_kind, require
from autopar.errors import HardwareProfileError, UnpricedError

PROFILE_FOLDER = Path(__file__).parent / "profiles"
ALIASES = MappingProxyType({"a100": "a100-80", "rtx-4090": "rtx4090", "4090": "rtx4090", "v100-32": "v100"})
_DTYPE_ALIASES = MappingProxyType(
    {"float8_e4m3fn": "float8", "float8_e5m2": "float8", "float8_e4m3fnuz": "float8", "float8_e5m2fnuz": "float8",
     "half": "float16", "float": "float32", "double": "float64"}
)  # fmt: skip
_DTYPE_BYTES = MappingProxyType(
    {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int64": 8, "int32": 4,
     "int16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1, "complex64": 8,
     "complex128": 16}
)  # fmt: skip


def canonical_dtype(dtype: str) -> str:
    """The profile's name of a torch dtype: `float8_e4m3fn` is `float8`; a leading `torch.` is dropped."""
    name = dtype.removeprefix("torch.")
    return _DTYPE_ALIASES.get(name, name)


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element."""
    size = _DTYPE_BYTES.get(canonical_dtype(dtype))
    if size is None:
        raise UnpricedError(f"dtype {dtype!r} has no known size", fix=f"use one of {sorted(_DTYPE_BYTES)}")
    return size


CONVOLUTIONS = ("forward", "backward", "grouped forward", "grouped backward", "wide grouped forward",
                "wide grouped backward")  # fmt: skip
"""Kinds of convolutions: grouped, as depthwise, where an output channel reads some of the input channels; wide, with
filters of more than 9 elements, for which libraries have other kernels."""
NARROW_FILTER = 9
HOST_STEP_BYTES_PER_S = 2e10
"""A round estimate: AdamW of 2^24 float32 elements on one core of a shared x86_64 (torch 2.13, 2026-12-01) moves 4.8e9
bytes/s of parameters, gradients and states by default, and 2.7e10 with `fused=True`; a rank has several cores."""


def convolution_kind(direction: str, groups: int, filter_elements: int) -> str:
    """One of `CONVOLUTIONS`; `filter_elements`: of a filter in one channel."""
    if groups == 1:
        return direction
    return f"{'wide ' if filter_elements > NARROW_FILTER else ''}grouped {direction}"


@dataclass(frozen=True, slots=True)
class MatmulCurve:
    """How near to its peak a device multiplies: time = flops / (peak * efficiency) + ramp_s.

    `efficiency` is the asymptote for large matrices, `ramp_s` the fill and drain of the kernel's pipeline, so half of
    the asymptote is reached at `ramp_s * peak * efficiency` flops. Rows and columns are padded to `tile`.
    """

    efficiency: float
    ramp_s: float
    tile: int

    def __post_init__(self) -> None:
        require(0 < self.efficiency <= 1, f"matmul efficiency {self.efficiency} is not in (0, 1]")
        require(self.ramp_s >= 0, f"matmul ramp_s {self.ramp_s} is negative")
        require(self.tile >= 1, f"matmul tile {self.tile} is below 1")


@dataclass(frozen=True, slots=True)
class KernelCost:
    """What one op takes on a device, by what it moves: launch_s + max(moved bytes / bytes_per_s, memory traffic)."""

    launch_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        require(self.launch_s >= 0, f"kernel launch_s {self.launch_s} is negative")
        require(self.bytes_per_s > 0, f"kernel bytes_per_s {self.bytes_per_s} is not above 0")


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or one rank's share of a CPU): what it computes and moves per second.

    `peak_flops` by dtype; "float32" is also the rate of vector (non-matmul) arithmetic. `matmul` gives the curve by
    dtype. `attention_efficiency` and `convolution_efficiency` are fractions of the matmul rate of the same dtype.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    launch_s: float  # device time lost per kernel
    matmul: Mapping[str, MatmulCurve]
    memory_efficiency: float  # fraction of memory_bytes_per_s that a large copy reaches
    attention_forward_efficiency: float
    attention_backward_efficiency: float
    convolution_efficiency: float
    host_bytes_per_s: float  # to host memory, for offload
    host_step_bytes_per_s: float = HOST_STEP_BYTES_PER_S  # moved by an optimizer's step of what lies on the host
    is_host: bool = False  # the device is the host: what is offloaded lies in the same memory
    cache_bytes: float = 0.0  # of a memory-bound op, moved at cache_bytes_per_s; 0: not modelled
    cache_bytes_per_s: float = 0.0
    causal_fraction: float = 0.5  # of the scores that attention computes under a causal mask; 1: the kernel skips none
    convolution_shares: Mapping[str, float] = field(default_factory=dict)  # by kind, of that efficiency; usually 1
    view_s: float = 0.0  # of a node that runs no kernel, where the processor that starts kernels also runs them
    kernels: Mapping[str, KernelCost] = field(default_factory=dict)  # by op; an op that is not here: memory-bound
    source: str = ""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = (self.name, self.memory_bytes, self.memory_bytes_per_s, self.launch_s, *self.peak_flops.items())
        object.__setattr__(self, "_hash", hash(numbers))  # once: a price looks its device up in caches
        object.__setattr__(self, "peak_flops", MappingProxyType(dict(self.peak_flops)))
        object.__setattr__(self, "matmul", MappingProxyType(dict(self.matmul)))
        object.__setattr__(self, "kernels", MappingProxyType(dict(self.kernels)))
        object.__setattr__(self, "convolution_shares", MappingProxyType(dict(self.convolution_shares)))
        require(bool(self.peak_flops), f"{self.name}: peak_flops is empty")
        for dtype, flops in self.peak_flops.items():
            require(flops > 0, f"{self.name}: peak_flops[{dtype!r}] is not above 0")
            require(dtype in self.matmul, f"{self.name}: no matmul curve for {dtype!r}")
        for name in ("memory_bytes", "memory_bytes_per_s", "host_bytes_per_s", "host_step_bytes_per_s"):
            require(getattr(self, name) > 0, f"{self.name}: {name} is not above 0")
        for name in ("memory_efficiency", "attention_forward_efficiency", "attention_backward_efficiency",
                     "convolution_efficiency"):  # fmt: skip
            require(0 < getattr(self, name) <= 1, f"{self.name}: {name} is not in (0, 1]")
        require(0.5 <= self.causal_fraction <= 1, f"{self.name}: causal_fraction is not in [0.5, 1]")
        for kind, share in self.convolution_shares.items():
            require(kind in CONVOLUTIONS, f"{self.name}: {kind!r} in convolution_shares is not one of {CONVOLUTIONS}")
            require(share > 0, f"{self.name}: convolution_shares[{kind!r}] is not above 0")
        require(self.launch_s >= 0, f"{self.name}: launch_s is negative")
        require(self.view_s >= 0, f"{self.name}: view_s is negative")
        require(self.cache_bytes >= 0, f"{self.name}: cache_bytes is negative")
        cached = self.cache_bytes_per_s > 0 or not self.cache_bytes
        require(cached, f"{self.name}: cache_bytes without cache_bytes_per_s")

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        values = (getattr(self, item.name) for item in fields(self) if item.init)
        return Device, tuple(dict(value) if isinstance(value, MappingProxyType) else value for value in values)

    def at_speed(self, speed: float) -> Device:
        """The device with every rate of computation and memory at a fraction of its own."""
        if speed == 1:
            return self
        return replace(
            self,
            peak_flops={dtype: flops * speed for dtype, flops in self.peak_flops.items()},
            memory_bytes_per_s=self.memory_bytes_per_s * speed,
            cache_bytes_per_s=self.cache_bytes_per_s * speed,
            launch_s=self.launch_s / speed,
            matmul={dtype: replace(curve, ramp_s=curve.ramp_s / speed) for dtype, curve in self.matmul.items()},
            kernels={
                op: KernelCost(cost.launch_s / speed, cost.bytes_per_s * speed) for op, cost in self.kernels.items()
            },
        )

    def peak(self, dtype: str) -> float:
        """Peak flops per second for matmuls of a dtype; `UnpricedError` if the device has none."""
        flops = self.peak_flops.get(canonical_dtype(dtype))
        if flops is None:
            raise UnpricedError(
                f"{self.name} has no price for {dtype} arithmetic",
                fix=f"use one of {sorted(self.peak_flops)}, or add {dtype!r} to the profile's peak_flops",
            )
        return flops


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """A machine: its device, the link inside a node, the link between nodes, and the library's protocols.

    `rank_speeds` and `rank_memory_bytes` are empty for a homogeneous machine; else one entry per rank: the speed as a
    fraction of `device` and the memory in place of the device's.
    """

    name: str
    device: Device
    ranks_per_node: int
    intra: Link
    inter: Link
    protocols: tuple[Protocol, ...]
    rank_speeds: tuple[float, ...] = ()
    rank_memory_bytes: tuple[int, ...] = ()
    overlap: float = 1.0  # the rate of compute on a rank while it communicates: 0 where nothing overlaps
    overlap_after_s: float = 0.0  # computation that passes before communication beside it gets going
    source: str = ""
    residuals: Mapping[str, float] = field(default_factory=dict)  # of a calibration: price over measurement, by op

    def __post_init__(self) -> None:
        object.__setattr__(self, "residuals", MappingProxyType(dict(self.residuals)))
        require(self.ranks_per_node >= 1, f"{self.name}: ranks_per_node is below 1")
        require(bool(self.protocols), f"{self.name}: no protocol")
        require(0 <= self.overlap <= 1, f"{self.name}: overlap {self.overlap} is not in [0, 1]")
        require(self.overlap_after_s >= 0, f"{self.name}: overlap_after_s is negative")
        require(all(speed > 0 for speed in self.rank_speeds), f"{self.name}: a rank speed is not above 0")
        require(all(held > 0 for held in self.rank_memory_bytes), f"{self.name}: a rank's memory is not above 0")

    def __hash__(self) -> int:
        return hash((self.name, self.device, self.ranks_per_node, self.intra, self.inter))

    def __reduce__(self) -> tuple[Any, ...]:
        return HardwareProfile.from_json, (self.to_json(),)

    def speed(self, rank: int) -> float:
        """A rank's speed as a fraction of `device`; ranks beyond `rank_speeds` run at 1."""
        return self.rank_speeds[rank] if rank < len(self.rank_speeds) else 1.0

    def memory_bytes(self, rank: int) -> int:
        """A rank's memory."""
        return self.rank_memory_bytes[rank] if rank < len(self.rank_memory_bytes) else self.device.memory_bytes

    def slowest_speed(self, ranks: int) -> float:
        """The speed of the slowest of the first `ranks` ranks: of a step that all of them run alike."""
        return min(self.speed(rank) for rank in range(ranks)) if self.rank_speeds else 1.0

    def least_memory_bytes(self, ranks: int) -> int:
        """The memory of the smallest of the first `ranks` ranks."""
        return min(map(self.memory_bytes, range(ranks))) if self.rank_memory_bytes else self.device.memory_bytes

    def to_json(self) -> str:
        """The profile as JSON text: `HardwareProfile.from_json` gives it back."""
        return json.dumps(_plain(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> HardwareProfile:
        """A checked profile from JSON text; `HardwareProfileError` names the field that is wrong.

        `"base": "h100"` stands for all fields of that profile that the text does not give.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise HardwareProfileError(f"the profile is not JSON: {error}", fix="see cost_models/profiles") from error
        require(isinstance(data, dict), "the profile is not a JSON object")
        if "base" in data:
            data = _merged(_plain(load_profile(str(data.pop("base")))), data)
        device = _section(data, "device")
        matmul = {dtype: _build(MatmulCurve, curve) for dtype, curve in _section(device, "matmul").items()}
        kernels = {name: _build(KernelCost, cost) for name, cost in device.get("kernels", {}).items()}
        protocols = tuple(_build(Protocol, item) for item in data.get("protocols", ()))
        links = {name: _link(_section(data, name)) for name in ("intra", "inter")}
        vectors = {
            "rank_speeds": tuple(data.get("rank_speeds", ())),
            "rank_memory_bytes": tuple(map(int, data.get("rank_memory_bytes", ()))),
        }
        built = {"device": _build(Device, {**device, "matmul": matmul, "kernels": kernels}), "protocols": protocols}
        profile: HardwareProfile = _build(cls, {**data, **built, **links, **vectors})
        return profile


def load_profile(name_or_path: str | Path | HardwareProfile) -> HardwareProfile:
    """A shipped profile by name, or a JSON file by path; a profile is given back as it is."""
    if isinstance(name_or_path, HardwareProfile):
        return name_or_path
    name = str(name_or_path)
    shipped = PROFILE_FOLDER / f"{ALIASES.get(name.lower(), name.lower())}.json"
    path = shipped if shipped.is_file() else Path(name_or_path)
    if not path.is_file():
        raise HardwareProfileError(
            f"no hardware profile {name!r}", fix=f"use one of {', '.join(profile_names())}, or a path to a JSON file"
        )
    return _read_profile(path, path.stat().st_mtime_ns)


def profile_names() -> tuple[str, ...]:
    """The names of the shipped profiles, sorted."""
    return tuple(sorted(path.stem for path in PROFILE_FOLDER.glob("*.json")))


def profile_for_device_name(device_name: str) -> HardwareProfile | None:
    """The shipped profile of a device by the name its driver reports, such as `NVIDIA H100 80GB HBM3`, or None."""
    text = device_name.lower().replace(" ", "")
    for pattern, name in (("h200", "h200"), ("h100", "h100"), ("b200", "b200"), ("mi300x", "mi300x"), ("v100", "v100"),
                          ("4090", "rtx4090"), ("a100-sxm4-40", "a100-40"), ("a100-pcie-40", "a100-40"),
                          ("a100", "a100-80"), ("l40", ""), ("l4", "l4"), ("cpu", "cpu")):  # fmt: skip
        if pattern in text:
            return load_profile(name) if name else None
    return None


@dataclass(frozen=True, slots=True)
class AxisLinks:
    """What a collective over one mesh axis sees: a group of `ranks`, `ranks_per_node` of them in each of `nodes`.

    `sharing` groups of this axis use the same node's rails at the same time. `rails_per_rank` is what one rank could
    drive alone (at least one).
    """

    ranks: int
    ranks_per_node: int
    nodes: int
    intra: Link
    inter: Link
    sharing: int
    protocols: tuple[Protocol, ...]
    rails_per_rank: float = 1.0
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = (self.ranks, self.ranks_per_node, self.nodes, self.intra, self.inter, self.sharing, self.protocols)
        object.__setattr__(self, "_hash", hash(parts))  # once: every price looks its axis up in a cache

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:  # a hash is of this process: it is made again where this is read
        return AxisLinks, tuple(getattr(self, item.name) for item in fields(self) if item.init)

    @property
    def node_bytes_per_s(self) -> float:
        """What this group can send out of one node: its share of the rails, as many as its ranks can drive."""
        rails = min(self.inter.rails / self.sharing, self.ranks_per_node * self.rails_per_rank)
        return self.inter.bytes_per_s * rails


def axis_links(profile: HardwareProfile, mesh_shape: tuple[int, ...]) -> tuple[AxisLinks, ...]:
    """What each mesh axis sees, ranks in row-major order (the last axis is the fastest, so it stays in a node)."""
    return _axis_links(load_profile(profile), tuple(mesh_shape))


@lru_cache(maxsize=256)
def _axis_links(profile: HardwareProfile, mesh_shape: tuple[int, ...]) -> tuple[AxisLinks, ...]:
    require(all(size >= 1 for size in mesh_shape), f"mesh {mesh_shape} has an axis below 1")
    world = math.prod(mesh_shape)
    nodes = np.arange(world).reshape(mesh_shape) // profile.ranks_per_node
    present = min(profile.ranks_per_node, world)
    axes = []
    for axis, size in enumerate(mesh_shape):
        groups = np.sort(np.moveaxis(nodes, axis, -1).reshape(-1, size), axis=1)
        node_count = int((np.diff(groups, axis=1) != 0).sum(axis=1).max()) + 1
        in_node = -(-size // node_count)
        sharing = max(1, present // in_node)
        rails_each = max(1.0, profile.inter.rails / profile.ranks_per_node)
        axes.append(AxisLinks(size, in_node, node_count, profile.intra, profile.inter, sharing, profile.protocols,
                              rails_each))  # fmt: skip
    return tuple(axes)


@lru_cache(maxsize=64)
def _read_profile(path: Path, _modified_ns: int) -> HardwareProfile:
    return HardwareProfile.from_json(path.read_text())


def _merged(base: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The base with what is given; sections of both are merged too, but a link is given as a whole."""
    whole = ("intra", "inter")
    sections = {
        name: _merged(base[name], value)
        for name, value in given.items()
        if isinstance(value, dict) and isinstance(base.get(name), dict) and name not in whole
    }
    return {**base, **given, **sections}


def _section(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = data.get(name)
    if not isinstance(section, dict):
        raise HardwareProfileError(f"the profile has no section {name!r}", fix="see cost_models/profiles")
    return section


def _link(values: dict[str, Any]) -> Link:
    """A link written out in full, or as `kind`, `label_bytes_per_s` and `rails`."""
    label = values.get("label_bytes_per_s")
    if label is None:
        link: Link = _build(Link, values)
        return link
    require(values.keys() <= {"kind", "label_bytes_per_s", "rails"}, f"link with a label: unknown {sorted(values)}")
    return link_of_kind(str(values.get("kind")), float(label), rails=int(values.get("rails", 1)))


def _build(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """An instance from a mapping; a missing, unknown or mistyped field is a `HardwareProfileError`."""
    known = {item.name for item in fields(kind) if item.init}
    require(values.keys() <= known, f"{kind.__name__}: unknown fields {sorted(values.keys() - known)}")
    try:
        return kind(**values)
    except TypeError as error:
        raise HardwareProfileError(f"{kind.__name__}: {error}", fix="see cost_models/profiles") from error


def _plain(profile: HardwareProfile) -> dict[str, Any]:
    device = {item.name: getattr(profile.device, item.name) for item in fields(Device) if item.init}
    device["peak_flops"] = dict(profile.device.peak_flops)
    device["matmul"] = {dtype: asdict(curve) for dtype, curve in profile.device.matmul.items()}
    device["kernels"] = {name: asdict(cost) for name, cost in profile.device.kernels.items()}
    device["convolution_shares"] = dict(profile.device.convolution_shares)
    plain = {item.name: getattr(profile, item.name) for item in fields(HardwareProfile)}
    plain |= {"device": device, "residuals": dict(profile.residuals)}
    plain |= {"intra": asdict(profile.intra), "inter": asdict(profile.inter)}
    return plain | {"protocols": [asdict(item) for item in profile.protocols]}
