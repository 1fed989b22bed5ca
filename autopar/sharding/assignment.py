"""A plan resolved against one program: the strategy of every node, by name."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.sharding.layout import Layout
from autopar.sharding.strategies import Strategy


@dataclass(frozen=True)
class Assignment:
    """All that the passes need of a plan.

    `strategies`: for each call_function node except `operator.getitem` (which only names an output of its producer).
    `inputs`: layout of each placeholder. `outputs`: layout in which each element of the flat output tuple leaves;
    None leaves it in the layout of its producer (a result kept sharded).
    """

    mesh_shape: tuple[int, ...]
    strategies: Mapping[str, Strategy]
    inputs: Mapping[str, Layout]
    outputs: tuple[Layout | None, ...]

    def layout_of(self, node: fx.Node) -> Layout:
        """The layout of the tensor that `node` stands for in the traced graph."""
        if node.op == "placeholder":
            return self.inputs[node.name]
        if is_getitem(node):
            producer, index = node.args
            assert isinstance(producer, fx.Node) and isinstance(index, int)
            return self.strategies[producer.name].outputs[index]
        return self.strategies[node.name].outputs[0]


def is_getitem(node: fx.Node) -> bool:
    """Whether `node` picks one output of an op with several."""
    return node.op == "call_function" and node.target is operator.getitem
