"""`as_strided` reads memory by positions: in a program it is given whole tensors that lie in their own order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.errors import CaptureError
from autopar.torch_compat import FakeTensorMode

aten = torch.ops.aten
READS = (aten.as_strided.default, aten.as_strided_copy.default)
WRITES = aten.as_strided_scatter.default


def read_contiguous_tensors(
    graph: fx.Graph, scattered: Collection[str], mode: FakeTensorMode, line: Callable[[fx.Node], str]
) -> None:
    """Let every `as_strided` start from a contiguous tensor: the one behind the views that it is given, reordered.

    So what it reads no longer depends on how its input happens to lie in memory. `line` describes where a node came
    from. Raises CaptureError where the tensor behind the views has gaps or overlaps in memory, or is an input of the
    program among the `scattered`: their fakes are contiguous, they are not.
    """
    nodes: list[Any] = list(graph.nodes)  # of nodes whose arguments are those of these ops
    for node in nodes:
        if node.target in READS:
            node.args, node.kwargs = _from_base(node), {}
        if node.target not in (*READS, WRITES):
            continue
        source = node.args[0]
        order = None if source.name in scattered else _memory_order(source.meta["val"])
        if order is None:
            raise CaptureError(
                f"{node.target} reads the memory of a tensor that does not fill it in order",
                where=line(node),
                fix="use slices, unfold or gather, or as_strided of a contiguous tensor",
            )
        if not source.meta["val"].is_contiguous():
            _reorder(node, order, mode)


def _from_base(node: Any) -> tuple[Any, ...]:
    given = dict(zip(("self", "size", "stride", "storage_offset"), node.args, strict=False)) | node.kwargs
    source = given["self"]
    offset = given.get("storage_offset")
    if offset is None:
        offset = source.meta["val"].storage_offset()
    return behind_views(source), given["size"], given["stride"], offset


def behind_views(node: fx.Node) -> fx.Node:
    """The tensor of the same dtype of which a value is a view, or a view of a view; itself if it is none."""
    source = _viewed(node)
    while source is not None and source.meta["val"].dtype == node.meta["val"].dtype:
        node, source = source, _viewed(source)
    return node


def _viewed(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    maker = node.args[0] if node.target is operator.getitem else node  # of several views, as `split` makes them
    schema = getattr(maker.target, "_schema", None)
    source: object = maker.args[0] if maker.args else None
    if schema is None or not any(result.alias_info is not None for result in schema.returns):
        return None
    return source if isinstance(source, fx.Node) else None


def _memory_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """The dims from the outermost in memory to the innermost; None unless the elements fill it, each once."""
    shape, stride = value.shape, value.stride()
    order = sorted(range(value.dim()), key=lambda dim: -stride[dim] if shape[dim] != 1 else float("-inf"))
    step = 1
    for dim in reversed(order):
        if shape[dim] != 1 and stride[dim] != step:
            return None
        step *= shape[dim]
    return None if value.storage_offset() else tuple(order)


def _reorder(node: fx.Node, order: Sequence[int], mode: FakeTensorMode) -> None:
    """Let `node` work on its first argument with the dims as they lie in memory."""

    def add(target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        new = node.graph.call_function(target, args, kwargs)
        with mode:
            value = target(*map_arg(args, lambda item: item.meta["val"]), **kwargs)
        new.meta.update({**node.meta, "val": value})
        return new

    with node.graph.inserting_before(node):
        permuted = add(aten.permute.default, node.args[0], list(order))
        whole = add(aten.clone.default, permuted, memory_format=torch.contiguous_format)
    node.args = (whole, *node.args[1:])
    if node.target is not WRITES:
        return
    node.meta["val"] = whole.meta["val"]
    with node.graph.inserting_after(node):
        back = add(aten.permute.default, node, [list(order).index(dim) for dim in range(len(order))])
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
