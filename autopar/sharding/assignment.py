"""A plan resolved against one program: the strategy of every node, by name."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from torch import fx

from autopar.sharding.layout import Layout
from autopar.sharding.strategies import Strategy

RECOMPUTES = "recomputes"
"""Under this key of its metadata a node of the backward names the op of the forward that it computes again."""
OWN_STRATEGY = "strategy"
"""Under this key a node that a pass has added, and no plan knows of, has its strategy."""
VALUE_OF = "value_of"
"""Under this key a local node that holds the value of an op has (the op's key, which of its outputs)."""


@dataclass(frozen=True)
class Assignment:
    """All that the passes need of a plan.

    `strategies`: for each call_function node except `operator.getitem` (which only names an output of its producer).
    `inputs`: layout of each placeholder. `outputs`: layout in which each element of the flat output tuple leaves;
    None leaves it in the layout of its producer (a result kept sharded). `recomputed`: ops of the forward, by node
    name, whose values are not saved for the backward but computed again there. `gathered_once`: parameters, by node
    name, that the backward reads as the forward has gathered them. `packed`: by the key of an op and which of its
    outputs, the form (`passes.packings`) in which its value is held between the phases. `hosted`: parameters, by node
    name, that lie on the host, with their gradients, but those that are `staying`: who runs the program takes these
    there. `kept_experts`: the backward of a layer of experts to its forward, by node name, where it reads the rows and
    the arguments of the activation that the forward has; both have the same layouts.
    """

    mesh_shape: tuple[int, ...]
    strategies: Mapping[str, Strategy]
    inputs: Mapping[str, Layout]
    outputs: tuple[Layout | None, ...]
    recomputed: Set[str] = frozenset()
    gathered_once: Set[str] = frozenset()
    packed: Mapping[tuple[str, int], str] = field(default_factory=dict)
    hosted: Set[str] = frozenset()
    kept_experts: Mapping[str, str] = field(default_factory=dict)
    staying: Set[str] = frozenset()

    def strategy_of(self, node: fx.Node) -> Strategy:
        """The strategy of an op; what is recomputed has that of its original, what a pass added its own."""
        own: Strategy | None = node.meta.get(OWN_STRATEGY)
        return own or self.strategies[node.meta.get(RECOMPUTES, node.name)]

    def layout_of(self, node: fx.Node) -> Layout:
        """The layout of the tensor that `node` stands for in the traced graph."""
        if node.op == "placeholder":
            return self.inputs[node.name]
        if is_getitem(node):
            producer, index = node.args
            assert isinstance(producer, fx.Node) and isinstance(index, int)
            return self.strategy_of(producer).outputs[index]
        return self.strategy_of(node).outputs[0]


def is_getitem(node: fx.Node) -> bool:
    """Whether `node` picks one output of an op with several."""
    return node.op == "call_function" and node.target is operator.getitem
