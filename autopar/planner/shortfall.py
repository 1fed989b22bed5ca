"""What to say when nothing fits: by how much, what holds the memory, and the three ways out, computed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.errors import MemoryLimitError

OF_THE_BATCH = ("input", "output", "saved", "activation")
"""Kinds of memory that grow with the batch."""
OF_THE_MODEL = ("parameter", "gradient", "optimizer_state")


def does_not_fit(memory: Mapping[str, int], limit: int, ranks: int) -> MemoryLimitError:
    """The error for a thriftiest plan that holds `memory`, bytes by kind, on one of `ranks` ranks."""
    needed = sum(memory.values())
    held = ", ".join(f"{kind} {_bytes(bytes_)}" for kind, bytes_ in sorted(memory.items(), key=lambda it: -it[1])[:3])
    return MemoryLimitError(
        f"no plan found fits {_bytes(limit)} per rank: the thriftiest, with all recomputed or on the host that saves "
        f"memory, needs {_bytes(needed)}, {_bytes(needed - limit)} too much ({held})",
        fix="; or ".join(ways_out(memory, limit, ranks)),
    )


def ways_out(memory: Mapping[str, int], limit: int, ranks: int) -> tuple[str, ...]:
    """The ways out, the one that changes least first."""
    needed = sum(memory.values())
    short = needed - limit
    ways = [(short / needed, f"memory_limit_bytes={needed} ({short / limit:.1%} more)")]
    grows = sum(memory.get(kind, 0) for kind in OF_THE_BATCH)
    if grows > short:
        count = max(2, math.ceil(grows / (grows - short)))
        ways.append(
            (
                short / grows,
                f"a batch (or sequence) that is {short / grows:.0%} smaller, or the same one in parts: microbatches="
                f'{count} on a mesh with an axis "pp", if only of one rank',
            )
        )
    state = memory.get("optimizer_state", 0)
    if state > short:
        ways.append((short / state, f"an optimizer with {short / state:.0%} less state"))
    more = math.ceil(ranks * needed / max(1, limit))
    ways.append((more / ranks - 1, f"{more} ranks or more, over which what these {ranks} hold is cut evenly"))
    return tuple(text for _, text in sorted(ways)[:3])


def _bytes(bytes_: float) -> str:
    if bytes_ < 1e5:
        return f"{bytes_:.0f} bytes"
    return f"{bytes_ / 1e9:.3g} GB" if bytes_ >= 1e8 else f"{bytes_ / 1e6:.3g} MB"
