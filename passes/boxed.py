"""Graphs that take their inputs as one list and empty it, so that each input can be freed at its last use."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.graph import CodeGen

from autopar.torch_compat import LazyGraphModule


class BoxedCodeGen(CodeGen):
    """Generates `def forward(self, arguments)`: unpack the list, empty it, go on."""

    boxed = True

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *_: Any, **__: Any) -> str:
        names = [name for name in free_vars if name != "self"]
        unpacked = [f"    {name} = arguments[{index}]" for index, name in enumerate(names)]
        head = f"def {self._func_name}(self, arguments){maybe_return_annotation}:"
        return "\n".join([head, *unpacked, "    arguments.clear()"])

    def process_inputs(self, *inputs: Any) -> Any:
        return inputs[0] if len(inputs) == 1 and isinstance(inputs[0], list) else inputs


def boxed(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A graph module that runs `graph` with the attributes of `gm`, called with one list."""
    graph.set_codegen(BoxedCodeGen())
    return LazyGraphModule(gm, graph)
