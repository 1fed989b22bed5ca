"""Seconds of a collective over one mesh axis: the cheapest algorithm and protocol, as NCCL would choose.

Every algorithm is affine in the bytes, `latency_s + bytes / rate`, so a group's prices are compiled once to
(latency, seconds per byte) pairs, and a call is a minimum over a handful of lines, in bulk over numpy bytes.

`bytes_` is the size of the full tensor over the group: the output of all_gather, the input of reduce_scatter and
all_reduce, the whole local buffer of all_to_all, the message of broadcast and send.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import sympy

from autopar.cost_models.formula import Formula, Number, Numeric, Priced, symbols
from autopar.cost_models.hardware import AxisLinks
from autopar.cost_models.links import Protocol
from autopar.errors import UnpricedError

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")

# Of the rate of a ring, reached by a tree: the pipeline of a tree has bubbles. NCCL's own table has 0.5 to 0.92;
# chosen by hand on all_reduce over 2 nodes of p4d.24xlarge, nccl_bandwidth.csv, all rows seen.
TREE_FRACTION = 0.85
# What a rank spends on each message of an all_to_all: chosen by hand on 2 and 8 nodes of Polaris and 10 nodes of H100
# in nccl_bandwidth.csv, all rows seen. Messages overlap, so the hop's latency is paid once.
MESSAGE_S = 4.5e-6
NCCL_TUNING = "NCCL src/graph/tuning.cc (latency of a base and of every hop, rate by protocol)"
_S, _n, _N, _g = symbols("bytes ranks nodes ranks_per_node")
_base, _hop_in, _hop_out, _message = symbols("base_s hop_inside_s hop_between_s message_s")
_R, _rate_in, _rate_out, _switch = symbols("ring_bytes_per_s inside_bytes_per_s node_bytes_per_s switch_bytes_per_s")
_UNITS = {
    "bytes": "B",
    "ranks": "",
    "nodes": "",
    "ranks_per_node": "",
    "base_s": "s",
    "hop_inside_s": "s",
    "hop_between_s": "s",
    "message_s": "s",
    "ring_bytes_per_s": "B/s",
    "inside_bytes_per_s": "B/s",
    "node_bytes_per_s": "B/s",
    "switch_bytes_per_s": "B/s",
}


def _formula(name: str, expression: sympy.Expr, source: str, leaves_out: str = "") -> Formula:
    used = {str(item) for item in expression.free_symbols}
    units = {key: unit for key, unit in _UNITS.items() if key in used}
    return Formula(name, expression, units, source, leaves_out=leaves_out)


# The last chunk to arrive has passed every link between nodes, unless it started just behind one.
_out_hops = sympy.Piecewise((_N - 1, (_g <= 1) | (_N <= 1)), (_N, True))
_ring_hops = (_n - 1 - _out_hops) * _hop_in + _out_hops * _hop_out
_tree_depth = sympy.ceiling(sympy.log(sympy.Max(_N, 1)) / sympy.log(2))
_tree_shared = sympy.Piecewise((1, _N <= 2), (2, True))  # a node of a double binary tree sends its bytes up and down

RING_HALF = _formula(
    "ring all_gather or reduce_scatter",
    _base + _ring_hops + (_n - 1) / _n * _S / _R,
    "Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005; " + NCCL_TUNING,
    "contention between mesh axes other than on the rails",
)
RING_ALL_REDUCE = _formula(
    "ring all_reduce",
    _base + 2 * _ring_hops + 2 * (_n - 1) / _n * _S / _R,
    "Patarasuk and Yuan, JPDC 69(2), 2009; " + NCCL_TUNING,
)
TREE_ALL_REDUCE = _formula(
    "tree all_reduce",
    _base
    + 2 * ((_g - 1) * _hop_in + _tree_depth * _hop_out)
    + sympy.Max(2 * _S / _rate_in, _tree_shared * _S / _rate_out) / TREE_FRACTION,
    "Sanders, Speck and Traff, Parallel Computing 35(12), 2009 (two trees); " + NCCL_TUNING,
    "uneven nodes",
)
SWITCH_ALL_REDUCE = _formula(
    "in-switch all_reduce",
    _base + 2 * (2 * _hop_in + _tree_depth * _hop_out) + sympy.Max(_S / _switch, _tree_shared * _S / _rate_out),
    "NCCL NVLS and NVLSTree: the switch reduces and multicasts, a tree joins the nodes",
    "in-network reduction between nodes (SHARP)",
)
ONE_NODE_ALL_TO_ALL = _formula(
    "pairwise all_to_all inside a node",
    _base + _hop_in + (_n - 1) * _message + (_n - 1) / _n * _S / _rate_in,
    "every rank sends 1/ranks of its buffer to each other rank",
)
ALL_TO_ALL = _formula(
    "pairwise all_to_all over nodes",
    _base
    + _hop_out
    + (_n - 1) * _message
    + sympy.Max((_g - 1) / _n * _S / _rate_in, (_n - _g) / _n * _g * _S / _rate_out),
    "every rank sends 1/ranks of its buffer to each other rank; a node's ranks share its rails",
)
PIPELINED_BROADCAST = _formula(
    "pipelined ring broadcast",
    _base + _ring_hops + _S / _R,
    "NCCL: chunks flow along the ring, so the bytes pass every link once; " + NCCL_TUNING,
)
SEND = _formula("send", _base + _hop_in + _S / _rate_in, "one message over one link: Hockney's alpha-beta model")
SEND_BETWEEN_NODES = _formula("send between nodes", _base + _hop_out + _S / _rate_out, SEND.source)


@dataclass(frozen=True, slots=True)
class Line:
    """One algorithm over one protocol on one group: seconds = latency_s + seconds_per_byte * bytes."""

    formula: Formula
    protocol: Protocol
    numbers: tuple[tuple[str, float], ...]  # of every symbol but `bytes`
    latency_s: float
    seconds_per_byte: float
    from_bytes: float = 0.0  # the library uses it for messages of this size and more


def collective_seconds(kind: str, bytes_: Numeric, axis: AxisLinks) -> Number:
    """Seconds of one collective over a mesh axis; 0 only for a group of one rank, which sends nothing."""
    lines = collective_lines(kind, axis)
    if isinstance(bytes_, np.ndarray):
        sizes = bytes_.astype(np.float64)
        total = np.full(sizes.shape, np.inf if lines else 0.0)
        for line in lines:
            usable = sizes >= line.from_bytes
            np.minimum(total, line.latency_s + line.seconds_per_byte * sizes, out=total, where=usable)
        return total
    size = float(bytes_)
    usable_lines = (line for line in lines if size >= line.from_bytes)
    return min((line.latency_s + line.seconds_per_byte * size for line in usable_lines), default=0.0)


def collective_price(kind: str, bytes_: float, axis: AxisLinks) -> Priced | None:
    """The price of one collective by the algorithm and protocol that are chosen for it; None over one rank."""
    usable = [line for line in collective_lines(kind, axis) if bytes_ >= line.from_bytes]
    if not usable:
        return None
    best = min(usable, key=lambda line: line.latency_s + line.seconds_per_byte * bytes_)
    label = f"{kind}, protocol {best.protocol.name}"
    return Priced(best.formula, {"bytes": bytes_, **dict(best.numbers)}, label=label)


def explain_collective(kind: str, bytes_: float, axis: AxisLinks) -> str:
    """The algorithm and protocol chosen for these bytes, its formula and the numbers in it."""
    price = collective_price(kind, bytes_, axis)
    if price is None:
        return f"{kind} over one rank = 0 s"
    return f"{price.label}: {price.formula.explain(**price.numbers)}"


@lru_cache(maxsize=4096)
def collective_lines(kind: str, axis: AxisLinks) -> tuple[Line, ...]:
    """Every algorithm and protocol that could carry `kind` over this axis; empty for a group of one rank."""
    if kind not in COLLECTIVES:
        raise UnpricedError(f"collective {kind!r} has no price", fix=f"use one of {', '.join(COLLECTIVES)}")
    if axis.ranks == 1:
        return ()
    link = axis.intra if axis.nodes == 1 else axis.inter
    bulk = axis.protocols[-1]  # in-switch reduction has no low-latency protocol
    lines = [
        _line(formula, protocol, kind, axis)
        for formula in _candidates(kind, axis)
        for protocol in axis.protocols
        if protocol.name != link.without_protocol and (formula is not SWITCH_ALL_REDUCE or protocol is bulk)
    ]
    if kind == "send" and link.point_to_point_full_bytes:
        whole = replace(axis, intra=replace(axis.intra, point_to_point_fraction=1.0))
        line = _line(_candidates(kind, axis)[0], bulk, kind, whole)
        lines.append(replace(line, from_bytes=link.point_to_point_full_bytes))
    return tuple(lines)


def _candidates(kind: str, axis: AxisLinks) -> tuple[Formula, ...]:
    between = axis.nodes > 1
    if kind == "all_reduce":
        switched = axis.intra.in_switch_fraction > 0 and axis.ranks_per_node >= axis.intra.in_switch_min_ranks
        trees = (TREE_ALL_REDUCE,) if between else ()
        return (RING_ALL_REDUCE, *trees, *((SWITCH_ALL_REDUCE,) if switched else ()))
    if kind in ("all_gather", "reduce_scatter"):
        return (RING_HALF,)
    if kind == "all_to_all":
        return (ALL_TO_ALL,) if between else (ONE_NODE_ALL_TO_ALL,)
    if kind == "broadcast":
        return (PIPELINED_BROADCAST,)
    return (SEND_BETWEEN_NODES,) if between else (SEND,)


def _line(formula: Formula, protocol: Protocol, kind: str, axis: AxisLinks) -> Line:
    numbers = _numbers(protocol, kind, axis)
    numbers = {name: value for name, value in numbers.items() if name in formula.units}
    latency_s = float(formula.value(bytes=0.0, **numbers))
    probe_bytes = 2.0**60  # large, so that the difference is all bandwidth
    slope = (float(formula.value(bytes=probe_bytes, **numbers)) - latency_s) / probe_bytes
    if not (math.isfinite(latency_s) and math.isfinite(slope)):
        raise UnpricedError(f"{kind} over {axis.ranks} ranks has no finite price", fix="check the profile's links")
    return Line(formula, protocol, tuple(numbers.items()), latency_s, slope)


def _numbers(protocol: Protocol, kind: str, axis: AxisLinks) -> dict[str, float]:
    bulk = protocol is axis.protocols[-1]
    peers = kind in ("send", "all_to_all")
    hop_factor = 1.0 if peers else protocol.hop_factor  # no pipeline of steps to synchronize
    inside = axis.intra.bytes_per_s * protocol.bandwidth_fraction
    between = axis.node_bytes_per_s * protocol.bandwidth_fraction
    if not bulk:
        inside, between = inside * axis.intra.low_latency_fraction, between * axis.inter.low_latency_fraction
    if kind == "send":
        inside *= axis.intra.point_to_point_fraction
        between = axis.inter.bytes_per_s * min(axis.rails_per_rank, axis.inter.rails / axis.sharing)
        between *= axis.inter.point_to_point_fraction * protocol.bandwidth_fraction
    elif kind != "all_reduce":
        inside *= getattr(axis.intra, f"{kind}_fraction")
        between *= getattr(axis.inter, f"{kind}_fraction")
    ring = inside if axis.nodes == 1 else between if axis.ranks_per_node == 1 else min(inside, between)
    return {
        "ranks": axis.ranks,
        "nodes": axis.nodes,
        "ranks_per_node": axis.ranks_per_node,
        "base_s": protocol.base_s,
        "hop_inside_s": axis.intra.latency_s * hop_factor,
        "hop_between_s": axis.inter.latency_s * hop_factor,
        "message_s": MESSAGE_S,
        "ring_bytes_per_s": ring,
        "inside_bytes_per_s": inside,
        "node_bytes_per_s": between,
        "switch_bytes_per_s": axis.intra.bytes_per_s * axis.intra.in_switch_fraction * protocol.bandwidth_fraction,
    }
