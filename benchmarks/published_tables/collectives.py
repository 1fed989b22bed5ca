"""NCCL timings of nccl_bandwidth.csv against `cost_models.collectives`.

A system is found by words in the row's `gpu` and `network`; it names a profile, the link between its nodes, the label
rate of one rail and the rails of a node.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.hardware import AxisLinks, axis_links, load_profile
from autopar.cost_models.links import link_of_kind
from benchmarks.published_tables.comparison import Claim, Row, Table, halves, judged, quantile_error, read_rows

FILE = "nccl_bandwidth.csv"
COLUMNS = ("gpu", "network", "ngpus", "nnodes", "collective", "bytes", "time_us")
MIB = 2**20
KINDS: dict[str, str] = {
    "all_reduce": "all_reduce", "allreduce": "all_reduce", "all_gather": "all_gather", "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all", "all_to_all": "all_to_all", "sendrecv": "send",
    "broadcast": "broadcast",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class System:
    """A machine that the table measured; the first whose pattern matches `gpu | network` is the row's."""

    pattern: str
    profile: str
    link: str
    rail_bytes_per_s: float  # on the label, one direction
    rails: int
    domain_ranks: int = 8  # ranks that share NVLink


SYSTEMS = (
    System(r"polaris", "a100-40", "slingshot", 25e9, 2, 4),
    System(r"snellius", "h100", "infiniband", 25e9, 4, 4),
    System(r"(p5en|h200).*efa", "h200", "efa2", 12.5e9, 32),
    System(r"(p6|b200|b300).*efa", "b200", "efa2", 50e9, 8),
    System(r"(p5|h100).*efa", "h100", "efa2", 12.5e9, 32),
    System(r"p4d.*efa|a100.*efa", "a100-40", "efa1", 12.5e9, 4),
    System(r"a100.*(oci|roce)", "a100-40", "roce", 12.5e9, 16),
    System(r"^gb[23]00", "b200", "infiniband", 50e9, 72, 72),
    System(r"^[^|]*b[23]00", "b200", "infiniband", 50e9, 8),
    System(r"^[^|]*h200", "h200", "infiniband", 50e9, 8),
    System(r"h100.*roce", "h100", "roce", 50e9, 8),
    System(r"^[^|]*h100", "h100", "infiniband", 50e9, 8),
    System(r"mi300", "mi300x", "infiniband", 50e9, 8),
    System(r"a100", "a100-80", "infiniband", 25e9, 8),
    System(r"v100", "v100", "infiniband", 12.5e9, 4),
    System(r"^[^|]*(l40|l4\b|4090|a10g|a10\b)", "l4", "ethernet", 12.5e9, 1),
)


def system_of(row: dict[str, str]) -> System | None:
    """The system of a row, or None if its machine is not known."""
    text = f"{row['gpu']} | {row['network']}".lower()
    return next((system for system in SYSTEMS if re.search(system.pattern, text)), None)


def axis_of(row: dict[str, str], system: System) -> AxisLinks:
    """What the collective of a row sees: all its GPUs, spread evenly over its NVLink domains."""
    ranks = int(row["ngpus"])
    domains = max(1, -(-ranks // system.domain_ranks)) if system.domain_ranks > 8 else int(row["nnodes"])
    per_domain = -(-ranks // domains)
    profile = load_profile(system.profile)
    inter = link_of_kind(system.link, system.rail_bytes_per_s, rails=system.rails)
    axis = axis_links(replace(profile, ranks_per_node=per_domain, inter=inter), (ranks,))[0]
    return replace(axis, rails_per_rank=max(1.0, system.rails / system.domain_ranks))


def usable(row: dict[str, str]) -> bool:
    """Leaves out derived times, the Polaris rows that their authors mis-set, and what has no price here."""
    if row["collective"] not in KINDS or system_of(row) is None:
        return False
    if "derived" in (row.get("algo_note") or "") or not row["time_us"] or float(row["time_us"]) <= 0:
        return False
    mis_set = row["nnodes"] == "128" and row["collective"] in ("all_reduce", "alltoall")
    return not (mis_set and "polaris" in row["gpu"].lower())


def compare(path: Path, *, fitted_half: slice) -> Table:
    """Every usable row of the file; rows of `fitted_half` are marked as fitted."""
    every = read_rows(path, COLUMNS)
    rows = [row for row in every if judged(path, row, partial(usable, row))]
    unknown = sum(system_of(row) is None or row["collective"] not in KINDS for row in every)
    fitted = set(range(len(rows))[fitted_half])
    made = [judged(path, row, partial(_compared, row, fitted=index in fitted)) for index, row in enumerate(rows)]
    large = [item for item, row in zip(made, rows, strict=True) if float(row["bytes"]) >= MIB]
    small = [item for item, row in zip(made, rows, strict=True) if float(row["bytes"]) < MIB]
    claims = []
    for name, part in zip(("fitted half", "judged half"), halves(large), strict=True):
        claims.append(Claim(f"collectives ≥ 1 MiB, {name}", "median error", quantile_error(part, 0.5), 0.15, len(part)))
        claims.append(
            Claim(f"collectives ≥ 1 MiB, {name}", "90th percentile", quantile_error(part, 0.9), 0.40, len(part))
        )
    for name, part in zip(("fitted half", "judged half"), halves(small), strict=True):
        within = sum(1 for item in part if 0.5 <= item.predicted / item.measured <= 2)
        share = within / len(part) if part else float("nan")
        claims.append(Claim(f"collectives < 1 MiB, {name}", "share within 2x", share, 0.9, len(part), at_least=True))
    return Table("collectives", tuple(made), tuple(claims), unknown)


def _compared(row: dict[str, str], *, fitted: bool) -> Row:
    system = system_of(row)
    assert system is not None
    predicted_s = collective_seconds(KINDS[row["collective"]], float(row["bytes"]), axis_of(row, system))
    label = f"{row['gpu']} {row['ngpus']}x{row['nnodes']} {row['collective']} {float(row['bytes']):.4g} B"
    return Row(label, float(row["time_us"]) * 1e-6, float(predicted_s), fitted)
