"""Functionalization: in-place ops become out-of-place ones; what an input was changed to becomes an output."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.capture.recorder import Recorder
from autopar.torch_compat import FakeTensorMode


def mutates(node: fx.Node) -> bool:
    """Whether the op writes into one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def functionalize(graph_module: fx.GraphModule, mode: FakeTensorMode) -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """The same program without mutation, and per mutated placeholder (by name) the node of its new value.

    `meta["custom"]` is carried over. A graph that mutates nothing is returned as it is.
    """
    if not any(mutates(node) for node in graph_module.graph.nodes):
        return graph_module, {}
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    values = [node.meta["val"].detach() for node in placeholders]

    recorder = Recorder(mode)

    class Replay(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            recorder.meta = {"custom": n.meta["custom"]}
            return super().run_node(n)

    def run(*inputs: torch.Tensor) -> Any:
        return Replay(graph_module).run(*inputs, enable_io_processing=False)

    pure = recorder.record(torch.func.functionalize(run, remove="mutations"), values)
    fresh = [node for node in pure.graph.nodes if node.op == "placeholder"]
    names = {new: old.name for new, old in zip(fresh, placeholders, strict=True)}
    for new, old in zip(fresh, placeholders, strict=True):
        new.meta["custom"] = old.meta["custom"]
    mutated: dict[str, fx.Node] = {}
    for node in list(pure.graph.nodes):
        if node.target is torch.ops.aten.copy_.default and node.args[0] in names:
            mutated[names[node.args[0]]] = node.args[1]
            node.replace_all_uses_with(node.args[1])
            pure.graph.erase_node(node)
    return pure, mutated
