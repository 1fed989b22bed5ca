"""What a forward graph returns beside its results and what it saves: how many tokens chose each expert."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

EXPERT_COUNT = "expert_count"  # in the meta of the node whose value is the count


@dataclass(frozen=True, slots=True)
class ExpertCount:
    """A count of choices by expert, of the tokens that one rank has.

    `layer`: the path of the module. `axes`: the mesh axes whose ranks have other tokens. `spans`: first and end of the
    experts that are held together, by group of ranks; one span where every rank holds all. `holders`: the mesh axes
    along which the groups stand.
    """

    layer: str
    axes: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    holders: tuple[int, ...]


def observed(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Those of the nodes that count."""
    return [node for node in nodes if EXPERT_COUNT in node.meta]


def counts_of(graph: fx.Graph) -> tuple[ExpertCount, ...]:
    """What the counts that a forward graph returns are of, in their order."""
    return tuple(node.meta[EXPERT_COUNT] for node in observed(graph.nodes))
