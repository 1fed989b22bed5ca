"""Which parameters are the weights of which layers of experts, one row per expert, and of nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.capture.program import InputKind, Program
from autopar.sharding.rules.experts import WEIGHTS

FORWARD, BACKWARD = "autopar.experts.default", "autopar.experts_backward.default"
KEEP_ROWS = {  # ops of one tensor that compute every row of dim 0 from the same row
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.unsqueeze.default",
    "aten.squeeze.dim",
    "aten.transpose.int",
    "aten.permute.default",
    "aten.slice.Tensor",
    "aten.select.int",
    "aten.clone.default",
    "aten.alias.default",
    "aten.detach.default",
    "aten._to_copy.default",
}


@dataclass(frozen=True)
class ExpertWeights:
    """Layers that have their weights in common. `obstacle`: why the rows cannot be put into another order, or ""."""

    layers: tuple[str, ...]  # paths
    parameters: tuple[str, ...]  # names
    experts: int
    obstacle: str


def expert_weights(program: Program) -> tuple[ExpertWeights, ...]:
    """Of every layer of experts in the program's forward, in its order."""
    found: list[ExpertWeights] = []
    for node in program.graph_module.graph.nodes:
        if str(node.target) == FORWARD and node.meta.get("phase") != "backward":
            new = _weights_of(program, node)
            shared = [item for item in found if set(item.parameters) & set(new.parameters) or item.layers == new.layers]
            found = [item for item in found if item not in shared] + [_joined([*shared, new])]
    return tuple(found)


def _joined(items: list[ExpertWeights]) -> ExpertWeights:
    layers = tuple(dict.fromkeys(layer for item in items for layer in item.layers))
    parameters = tuple(dict.fromkeys(name for item in items for name in item.parameters))
    obstacle = next((item.obstacle for item in items if item.obstacle), "")
    return ExpertWeights(layers, parameters, items[0].experts, obstacle)


def _weights_of(program: Program, node: fx.Node) -> ExpertWeights:
    parameters = {item.node: item.name for item in program.inputs if item.kind is InputKind.PARAMETER}
    layer = node.meta["key"].rpartition("/")[0]
    names, obstacle = [], ""
    experts = _rows(node.args[WEIGHTS[0]])
    for argument in WEIGHTS:
        weight = node.args[argument]
        if not isinstance(weight, fx.Node):
            continue
        while _keeps_rows(weight, experts):
            (weight,) = weight.all_input_nodes
        if weight.name not in parameters:
            reason = f"its weights are no parameters but computed, by {weight.target} {_at(weight)}"
            obstacle = obstacle or reason
            continue
        names.append(parameters[weight.name])
        other = next(_other_readers(weight, experts), None)
        if other is not None:
            obstacle = obstacle or f"{names[-1]!r} is also read by {other.target} {_at(other)}"
    return ExpertWeights((layer,), tuple(dict.fromkeys(names)), experts, obstacle)


def _other_readers(node: fx.Node, experts: int) -> Iterator[fx.Node]:
    """What reads the rows of a weight otherwise than as a layer of experts does."""
    for user in node.users:
        first = {FORWARD: 0, BACKWARD: 1}.get(str(user.target))
        if first is not None:
            weights = {first + argument for argument in WEIGHTS}
            if any(item is node and place not in weights for place, item in enumerate(user.args)):
                yield user
        elif _keeps_rows(user, experts):
            yield from _other_readers(user, experts)
        else:
            yield user


def _keeps_rows(node: fx.Node, experts: int) -> bool:
    """Whether row e of the value is computed from row e of the one tensor that the op reads, for every e alike."""
    if node.op != "call_function" or str(node.target) not in KEEP_ROWS or len(node.all_input_nodes) != 1:
        return False
    rows = {_rows(node), _rows(node.all_input_nodes[0])} == {experts}
    dims = node.args[1] if len(node.args) > 1 else None
    match str(node.target):
        case "aten.permute.default":
            return rows and isinstance(dims, (tuple, list)) and dims[0] == 0
        case "aten.transpose.int":
            return rows and 0 not in _positive(node, node.args[1:3])
        case "aten.slice.Tensor" | "aten.select.int" | "aten.squeeze.dim":
            return rows and 0 not in _positive(node, node.args[1:2] or (0,))
        case "aten.unsqueeze.default":
            return rows and bool(dims != 0)
    return rows


def _positive(node: fx.Node, dims: tuple[object, ...]) -> list[int]:
    """Dims of the op's input, counted from the front."""
    count = len(node.all_input_nodes[0].meta["val"].shape)
    return [dim % count for dim in dims if isinstance(dim, int)]


def _rows(node: object) -> int:
    assert isinstance(node, fx.Node)
    shape = node.meta["val"].shape
    return int(shape[0]) if len(shape) else -1


def _at(node: fx.Node) -> str:
    where = node.meta.get("where", "")
    return f"at {where}" if where else f"({node.name})"
