"""From the raw trace to a program: pure, without dead or empty ops, with named inputs, outputs and nodes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from autopar.capture.functionalize import functionalize, mutates
from autopar.capture.observer import Origin
from autopar.capture.program import InputKind, OutputKind, ProgramInput, ProgramOutput, results_of
from autopar.capture.strided_views import read_contiguous_tensors
from autopar.errors import CaptureError, MutatedInputError
from autopar.sharding.op_call import op_name
from autopar.source import describe
from autopar.torch_compat import FakeTensorMode, LazyGraphModule

IDENTITIES = (
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.lift_fresh_copy.default,
)


SAME_VALUES: Mapping[Any, Any] = {  # forward-mode gradients hold zeros without memory, which mix devices
    torch.ops.aten._efficientzerotensor.default: torch.ops.aten.zeros.default,
}
DENSE_FORMS = (
    "use a dense tensor; instead of a product with a sparse matrix, index_add of the rows that its entries name"
)


@dataclass(frozen=True)
class Interface:
    """What the traced function's inputs and outputs stand for, in order; tangents by their position in the graph."""

    inputs: list[tuple[InputKind, str]]
    tangents: list[tuple[int, str]]
    outputs: list[ProgramOutput]
    scattered: frozenset[int] = frozenset()  # which inputs do not lie in memory in their own order


Assembled = tuple[fx.GraphModule, tuple[ProgramInput, ...], tuple[ProgramOutput, ...], Mapping[str, torch.Tensor]]


def assemble(raw: fx.GraphModule, interface: Interface, mode: FakeTensorMode) -> Assembled:
    """(graph module, inputs, outputs, constants) of the raw trace. Raises MutatedInputError."""
    _lift_tangents(raw, interface)
    constants = _lift_constants(raw)
    kinds = interface.inputs + [(InputKind.TANGENT, name) for _, name in interface.tangents]
    kinds += [(InputKind.CONSTANT, name) for name in constants]
    where = {_viewed(node.args[0]): node for node in raw.graph.nodes if mutates(node)}
    names = [node.name for node in raw.graph.nodes if node.op == "placeholder"]
    lines = {node.name: _line(change) for node, change in where.items() if isinstance(node, fx.Node)}
    pure, mutated = functionalize(raw, mode)
    kind_of = dict(zip(names, kinds, strict=True))
    _refuse_mutated_inputs(mutated, kind_of, lines)
    scattered = {names[index] for index in interface.scattered}
    read_contiguous_tensors(pure.graph, scattered, mode, _line)
    outputs = _add_mutated_buffers(pure, mutated, kind_of, interface.outputs)
    _refuse_sparse_values(pure.graph)
    graph_module = _rebuild(pure, [readable_name(*kind_of[name]) for name in names])
    placeholders = [node.name for node in graph_module.graph.nodes if node.op == "placeholder"]
    inputs = tuple(ProgramInput(node, *kind_of[name]) for node, name in zip(placeholders, names, strict=True))
    return graph_module, inputs, outputs, constants


def readable_name(kind: InputKind, name: str) -> str:
    """A placeholder's name: `layers_0_weight`, `input_labels`, `tangent_loss`, `seed`."""
    stem = re.sub(r"\W", "_", name)
    prefixed = kind in (InputKind.INPUT, InputKind.TANGENT) or not re.match(r"[A-Za-z]", stem)
    return f"{kind.value}_{stem.strip('_')}" if prefixed else stem


def _viewed(value: Any) -> Any:
    """The tensor behind a chain of views."""
    while isinstance(value, fx.Node) and value.op == "call_function" and value.args and _is_view(value):
        value = value.args[0]
    return value


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def _line(node: fx.Node) -> str:
    origin: Origin | None = node.meta.get("custom", {}).get("origin")
    return describe(*origin.where) if origin and origin.where else ""


def _lift_tangents(raw: fx.GraphModule, interface: Interface) -> None:
    nodes = list(raw.graph.nodes)
    last = [node for node in nodes if node.op == "placeholder"][-1]
    for position, name in interface.tangents:
        made = nodes[position]
        with raw.graph.inserting_after(last):
            last = raw.graph.placeholder(f"tangent_{name.replace('.', '_')}")
        last.meta.update(val=made.meta["val"], custom={"origin": None, "phase": "backward"})
        made.replace_all_uses_with(last)
        raw.graph.erase_node(made)


def _lift_constants(raw: fx.GraphModule) -> dict[str, torch.Tensor]:
    """Tensors that the model holds unregistered (graph attributes) become placeholders."""
    constants: dict[str, torch.Tensor] = {}
    held: dict[str, fx.Node] = {}
    last = [node for node in raw.graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in raw.graph.nodes if node.op == "get_attr"]:
        name = str(node.target)
        value = getattr(raw, name)
        if not isinstance(value, torch.Tensor):
            raise CaptureError(f"the trace holds {name}, a {type(value).__name__}: higher-order ops are not supported")
        if name not in constants:
            constants[name] = value
            with raw.graph.inserting_after(last):
                last = raw.graph.placeholder(name.strip("_"))
            last.meta.update(val=node.meta["val"], custom={"origin": None, "phase": "forward"})
            held[name] = last
        node.replace_all_uses_with(held[name])
        raw.graph.erase_node(node)
    return constants


def _refuse_mutated_inputs(
    mutated: Mapping[str, fx.Node], kinds: Mapping[str, tuple[InputKind, str]], lines: Mapping[str, str]
) -> None:
    for placeholder in mutated:
        kind, name = kinds[placeholder]
        if kind is not InputKind.BUFFER:
            raise MutatedInputError(
                f"the model writes into its {kind.value} {name!r}",
                where=lines.get(placeholder, ""),
                fix="write into a copy (x = x.clone()), or use the out-of-place form of the op",
            )


def _refuse_sparse_values(graph: fx.Graph) -> None:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise CaptureError(
                f"{node.target} makes a tensor of layout {value.layout}", where=_line(node), fix=DENSE_FORMS
            )


def _add_mutated_buffers(
    pure: fx.GraphModule,
    mutated: Mapping[str, fx.Node],
    kinds: Mapping[str, tuple[InputKind, str]],
    outputs: list[ProgramOutput],
) -> tuple[ProgramOutput, ...]:
    """Order the flat outputs: the user's, mutated buffers, gradients."""
    pairs = list(zip(outputs, results_of(pure.graph), strict=True))
    for placeholder, node in mutated.items():
        pairs.append((ProgramOutput(OutputKind.BUFFER, kinds[placeholder][1]), node))
    order = {OutputKind.LOSS: 0, OutputKind.OUTPUT: 0, OutputKind.BUFFER: 1, OutputKind.GRADIENT: 2}
    pairs.sort(key=lambda pair: order[pair[0].kind])
    pure.graph.output_node().args = ([node for _, node in pairs],)
    return tuple(output for output, _ in pairs)


def _rebuild(pure: fx.GraphModule, names: list[str]) -> fx.GraphModule:
    """A fresh graph: identity ops skipped, dead ops dropped, plain signature, annotated nodes."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    placeholders = iter(names)
    for node in pure.graph.nodes:
        if node.target in IDENTITIES:
            copies[node] = copies[node.args[0]]
        elif node.op == "placeholder":
            copies[node] = graph.placeholder(next(placeholders))
            copies[node].meta.update(node.meta)
        elif node.op == "output":
            values = tuple(copies[value] if isinstance(value, fx.Node) else value for value in node.args[0])
            graph.output(values)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].target = SAME_VALUES.get(node.target, node.target)
    graph.eliminate_dead_code()
    graph_module = LazyGraphModule(torch.nn.Module(), graph)
    _annotate(graph_module)
    return graph_module


def _annotate(graph_module: fx.GraphModule) -> None:
    """Give every node its phase, module, user's line, and a key that survives renumbering."""
    seen: Counter[str] = Counter()
    described = lru_cache(maxsize=None)(describe)
    for node in graph_module.graph.nodes:
        custom = node.meta.pop("custom", {})
        origin: Origin | None = custom.get("origin")
        phase = custom.get("phase") or _phase_of_inputs(node)
        module = origin.module if origin else ""
        where = described(*origin.where) if origin and origin.where else ""
        value = node.meta.get("val")
        node.meta.clear()
        node.meta.update(val=value, phase=phase, module=module, where=where, stack_trace=None)
        if node.op == "call_function":
            short = op_name(node.target).removeprefix("aten.").removesuffix(".default")
            stem = f"{module}/{short}" + (".backward" if phase == "backward" else "")
            node.meta["key"] = f"{stem}#{seen[stem]}"
            seen[stem] += 1
        else:
            node.meta["key"] = node.name


def _phase_of_inputs(node: fx.Node) -> str:
    phases = {source.meta["phase"] for source in node.all_input_nodes}
    return "backward" if "backward" in phases else "forward"
