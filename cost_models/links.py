"""Kinds of wire and what collectives reach on them: a label rate becomes a `Link` with measured fractions.

Units are in the names; a rate is in one direction. `link_of_kind` fills in the constants of a kind; a profile may
write them all out instead (as calibration does).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autopar.errors import HardwareProfileError


@dataclass(frozen=True, slots=True)
class Protocol:
    """One way a library sends: a fixed start, a factor on each hop's latency, a fraction of the link's rate."""

    name: str
    base_s: float
    hop_factor: float
    bandwidth_fraction: float

    def __post_init__(self) -> None:
        require(self.base_s >= 0 and self.hop_factor > 0, f"protocol {self.name}: latencies must be above 0")
        require(0 < self.bandwidth_fraction <= 1, f"protocol {self.name}: bandwidth_fraction is not in (0, 1]")


@dataclass(frozen=True, slots=True)
class Link:
    """A kind of wire. `bytes_per_s` is one direction of one rail, as reached by large collectives, not the label.

    Inside a node a rank has one rail of its own. Between nodes the `rails` of a node are shared by its ranks.
    """

    kind: str
    latency_s: float  # of one hop, in the protocol of least latency
    bytes_per_s: float
    rails: int = 1
    point_to_point_fraction: float = 1.0  # of bytes_per_s, for a message between one pair of ranks
    point_to_point_full_bytes: float = 0.0  # messages of this size and more reach all of bytes_per_s; 0 if none does
    all_to_all_fraction: float = 1.0  # of bytes_per_s, when every rank talks to every rank
    all_gather_fraction: float = (
        1.0  # of bytes_per_s: below 1 where the library does worse than a ring, above if better
    )
    reduce_scatter_fraction: float = 1.0
    broadcast_fraction: float = 1.0
    in_switch_fraction: float = 0.0  # all-reduce inside the switch: reduced bytes/s over bytes_per_s; 0 if it cannot
    in_switch_min_ranks: int = 0
    without_protocol: str = ""  # the protocol that the library does not use here
    low_latency_fraction: float = 1.0  # of the rate of every protocol but the last, where small messages are slow
    source: str = ""

    def __post_init__(self) -> None:
        require(self.latency_s >= 0, f"link {self.kind}: latency_s is negative")
        require(self.bytes_per_s > 0, f"link {self.kind}: bytes_per_s is not above 0")
        require(self.rails >= 1, f"link {self.kind}: rails is below 1")
        require(0 < self.point_to_point_fraction <= 1, f"link {self.kind}: point_to_point_fraction not in (0, 1]")
        require(self.point_to_point_full_bytes >= 0, f"link {self.kind}: point_to_point_full_bytes is negative")
        for name in ("all_to_all", "all_gather", "reduce_scatter", "broadcast"):
            fraction = getattr(self, f"{name}_fraction")
            require(0 < fraction < 100, f"link {self.kind}: {name}_fraction {fraction} not in (0, 100)")
        require(0 < self.low_latency_fraction <= 1, f"link {self.kind}: low_latency_fraction not in (0, 1]")
        require(0 <= self.in_switch_fraction <= 1, f"link {self.kind}: in_switch_fraction not in [0, 1]")


@dataclass(frozen=True, slots=True)
class LinkKind:
    """What a kind of link reaches, as fractions of its label; the fields are those of `Link`."""

    latency_s: float
    label_fraction: float
    source: str
    point_to_point_fraction: float = 1.0
    point_to_point_full_bytes: float = 0.0
    all_to_all_fraction: float = 1.0
    in_switch_fraction: float = 0.0
    in_switch_min_ranks: int = 0
    without_protocol: str = ""
    low_latency_fraction: float = 1.0


# "measured": chosen by hand with all of nccl_bandwidth.csv in view. `python -m benchmarks.published --fit` then fits
# latency and label fraction on its even rows alone: fractions agree within 2 %, latencies within 12 % (nvswitch4:
# 35 %). The other fractions of a kind have no automatic fit.
_NVLINK = "measured: NCCL tests on 4 H100s of one NVSwitch node; hop: NCCL src/graph/tuning.cc, NVLINK"
_ESTIMATE = "not measured: the label, less what its neighbours in this table lose"
_NO_LL128 = "no LL128: the network may reorder"
LINK_KINDS: Mapping[str, LinkKind] = MappingProxyType(
    {
        "nvlink2": LinkKind(0.6e-6, 0.767, _NVLINK, 0.45, 2.0**28),
        "nvswitch3": LinkKind(0.6e-6, 0.767, _NVLINK, 0.45, 2.0**28),
        "nvswitch4": LinkKind(0.6e-6, 0.767, _NVLINK, 0.45, 2.0**28, 1.0, 0.77, 5),
        "nvswitch5": LinkKind(0.6e-6, 0.767, _NVLINK, 0.45, 2.0**28, 1.0, 0.62, 6),
        "xgmi": LinkKind(0.8e-6, 0.7, _ESTIMATE),
        "pcie": LinkKind(1.0e-6, 0.38, "hop: NCCL src/graph/tuning.cc, PCI; rate " + _ESTIMATE),
        "infiniband": LinkKind(2.7e-6, 0.98, "measured: 10 nodes of H100; hop: NCCL tuning.cc, NET", 0.5, 0.0, 0.92),
        "roce": LinkKind(2.7e-6, 0.95, "measured: 2 nodes of A100 (OCI); hop as InfiniBand", 0.5, 0.0, 0.92),
        "efa1": LinkKind(70e-6, 0.98, f"measured: 2 nodes of p4d; {_NO_LL128}", 0.5, 0.0, 0.92, 0.0, 0, "LL128"),
        "efa2": LinkKind(27e-6, 0.98, f"measured: 2 nodes of p5; {_NO_LL128}", 0.5, 0.0, 0.92, 0.0, 0, "LL128"),
        "slingshot": LinkKind(20e-6, 0.73, "measured: 2 to 540 nodes, Polaris", 0.5, 0.0, 0.68, 0, 0, "LL128", 0.08),
        "ethernet": LinkKind(15e-6, 0.9, f"{_ESTIMATE}; {_NO_LL128}", 1.0, 0.0, 1.0, 0.0, 0, "LL128"),
        "loopback": LinkKind(100e-6, 1.0, "round numbers for gloo on one host, see `python -m autopar calibrate`"),
    }
)  # fmt: skip


def link_of_kind(kind: str, label_bytes_per_s: float, *, rails: int = 1) -> Link:
    """A link of a known kind, from the rate on its label (one direction, one rail)."""
    known = LINK_KINDS.get(kind)
    if known is None:
        raise HardwareProfileError(f"link kind {kind!r} is unknown", fix=f"use one of {', '.join(LINK_KINDS)}")
    return Link(
        kind,
        known.latency_s,
        label_bytes_per_s * known.label_fraction,
        rails,
        point_to_point_fraction=known.point_to_point_fraction,
        point_to_point_full_bytes=known.point_to_point_full_bytes,
        all_to_all_fraction=known.all_to_all_fraction,
        in_switch_fraction=known.in_switch_fraction,
        in_switch_min_ranks=known.in_switch_min_ranks,
        without_protocol=known.without_protocol,
        low_latency_fraction=known.low_latency_fraction,
        source=f"label {label_bytes_per_s / 1e9:g} GB/s; {known.source}",
    )


def require(condition: object, what: str) -> None:
    """Raise `HardwareProfileError` unless the condition holds."""
    if not condition:
        raise HardwareProfileError(what, fix="see the shipped files in cost_models/profiles for every field")
