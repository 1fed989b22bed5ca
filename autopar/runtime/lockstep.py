"""All ranks of an emitted program in one process: every rank runs to its next collective, and there they meet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from autopar.errors import CollectiveMismatchError
from autopar.ops import dispatch as _dispatch  # noqa: F401  (registers autopar::all_to_all_rows)
from autopar.runtime.virtual_groups import group_members

_c10d = torch.ops._c10d_functional
_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


class Observer(Protocol):
    """What may be watched of a lockstep run."""

    def on_rank(self, rank: int) -> AbstractContextManager[object]:
        """Entered while `rank` computes, and while a collective writes `rank`'s result."""

    def on_value(self, rank: int, node: fx.Node, value: Any) -> None:
        """Called with the value of each node, before anything that dies there is freed."""


class NoObserver:
    """Watches nothing."""

    def on_rank(self, rank: int) -> AbstractContextManager[object]:
        return nullcontext()

    def on_value(self, rank: int, node: fx.Node, value: Any) -> None:
        return None


@dataclass(frozen=True)
class Meeting:
    """A rank that waits at a collective for the others of its group."""

    rank: int
    node: fx.Node
    tensor: Tensor
    arguments: tuple[Any, ...]  # what follows the tensor, without the group

    group: str

    def __str__(self) -> str:
        size = f"{str(self.tensor.dtype).removeprefix('torch.')}{list(self.tensor.shape)}"
        return f"rank {self.rank} at {self.node.name} = {self.node.target}({size}, {self.arguments}, {self.group!r})"


Run = Generator[Meeting, None, Any]


def run_lockstep(
    graph_modules: Sequence[fx.GraphModule], inputs: Sequence[Sequence[Any]], observer: Observer | None = None
) -> list[Any]:
    """The outputs of each rank's graph on its inputs, in rank order.

    Requires: collectives are `_c10d_functional` ops on virtual groups. The members of a group must agree in the order,
    the sizes and the arguments of their collectives, else CollectiveMismatchError names the nodes. Values are freed at
    their last use, as in generated code, and the input of a collective at its wait at the earliest, as process groups
    do (all_reduce works on a copy). A list of inputs of a boxed graph is emptied, as by calling the graph.
    """
    watch = observer or NoObserver()
    inboxes: list[list[Tensor]] = [[] for _ in graph_modules]
    runs = [_run_rank(rank, gm, inputs[rank], inboxes[rank], watch) for rank, gm in enumerate(graph_modules)]
    outputs: dict[int, Any] = {}
    waiting: dict[int, Meeting] = {}
    for rank, run in enumerate(runs):
        _advance(rank, run, watch, waiting, outputs)
    while waiting:
        ranks = _complete_group(waiting)
        for rank, result in _meet([waiting.pop(rank) for rank in ranks], watch):
            inboxes[rank].append(result)
            del result  # the rank alone decides how long it lives
        for rank in ranks:
            _advance(rank, runs[rank], watch, waiting, outputs)
    return [outputs[rank] for rank in range(len(runs))]


def _advance(rank: int, run: Run, watch: Observer, waiting: dict[int, Meeting], outputs: dict[int, Any]) -> None:
    """Let one rank run to its next collective, or to its end."""
    try:
        with watch.on_rank(rank):
            waiting[rank] = next(run)
    except StopIteration as end:
        outputs[rank] = end.value


def _run_rank(rank: int, gm: fx.GraphModule, inputs: Sequence[Any], inbox: list[Tensor], watch: Observer) -> Run:
    """One rank's graph, node by node; yields at each collective and finds the result in its inbox."""
    given, values, held = list(inputs), dict[fx.Node, Any](), dict[fx.Node, Any]()
    if isinstance(inputs, list) and is_boxed(gm):
        inputs.clear()
    del inputs
    given.reverse()
    dying = _nodes_dying_at(gm.graph)
    for node in gm.graph.nodes:
        if node.op == "output":
            return fx.node.map_arg(node.args[0], values.__getitem__)
        if node.op == "placeholder":
            value = given.pop()
        elif node.op == "get_attr":
            value = attrgetter(str(node.target))(gm)
        elif is_collective(node):
            yield _meeting(rank, node, values)
            value = inbox.pop()
            if node.target is not _c10d.all_reduce.default:
                held[node] = _values(node.args[0], values)
        else:
            value = node.target(*_values(node.args, values), **_values(node.kwargs, values))
        if node.target is _c10d.wait_tensor.default:
            held.pop(node.args[0], None)
        watch.on_value(rank, node, value)
        values[node] = value
        del value
        for dead in dying[node]:
            del values[dead]
    return None


def _values(arguments: Any, values: dict[fx.Node, Any]) -> Any:
    return fx.node.map_arg(arguments, values.__getitem__)


def _meeting(rank: int, node: fx.Node, values: dict[fx.Node, Any]) -> Meeting:
    tensor, *arguments, group = _values(node.args, values)
    return Meeting(rank, node, tensor, tuple(arguments), group)


def is_boxed(gm: fx.GraphModule) -> bool:
    """Whether the graph takes its inputs as one list, which it empties."""
    return bool(getattr(gm.graph._codegen, "boxed", False))


def is_collective(node: fx.Node) -> bool:
    """Whether `node` starts a collective (a wait is not one)."""
    return node.op == "call_function" and node.target in _EXCHANGES


def _nodes_dying_at(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Per node, the nodes whose values nothing reads afterwards (unused ones die at once)."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        for source in node.all_input_nodes:
            last[source] = node
    dying: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, at in last.items():
        dying[at].append(node)
    return dying


def _complete_group(waiting: dict[int, Meeting]) -> tuple[int, ...]:
    """A group whose members have all arrived; an error if there is none, for then no rank can go on."""
    for group in dict.fromkeys(meeting.group for meeting in waiting.values()):
        members = group_members(group)
        if all(rank in waiting and waiting[rank].group == group for rank in members):
            return members
    raise CollectiveMismatchError(_lines("no rank can go on: members of a group wait elsewhere", waiting.values()))


def _meet(meetings: Sequence[Meeting], watch: Observer) -> list[tuple[int, Tensor]]:
    """Each member and its own copy of its result of one collective."""
    first = meetings[0]
    for meeting in meetings:
        if meeting.node.target is not first.node.target or meeting.tensor.dtype != first.tensor.dtype:
            raise CollectiveMismatchError(_lines("members of a group start different collectives", meetings))
    exchange, same_shape = _EXCHANGES[first.node.target]
    if same_shape and any((it.tensor.shape, it.arguments) != (first.tensor.shape, first.arguments) for it in meetings):
        raise CollectiveMismatchError(_lines("members of a group disagree in sizes or arguments", meetings))
    shares = exchange(meetings)
    results = []
    for meeting, share in zip(meetings, shares, strict=True):
        with watch.on_rank(meeting.rank):
            results.append((meeting.rank, share.clone(memory_format=torch.contiguous_format)))
    return results


def _lines(what: str, meetings: Any) -> str:
    return "\n  ".join([what, *map(str, meetings)])


def _reduced(meetings: Sequence[Meeting]) -> Tensor:
    name = meetings[0].arguments[0]
    if name not in _REDUCTIONS:
        raise CollectiveMismatchError(_lines(f"no reduction is called {name!r}", meetings[:1]))
    total = reduce(_REDUCTIONS[name], (meeting.tensor for meeting in meetings))
    return total / len(meetings) if name == "avg" else total


def _check_group_size(meetings: Sequence[Meeting], group_size: int) -> None:
    if group_size != len(meetings):
        raise CollectiveMismatchError(_lines(f"a group of {len(meetings)} is said to have {group_size}", meetings[:1]))


def _all_reduce(meetings: Sequence[Meeting]) -> Sequence[Tensor]:
    return [_reduced(meetings)] * len(meetings)


def _all_gather(meetings: Sequence[Meeting]) -> Sequence[Tensor]:
    _check_group_size(meetings, meetings[0].arguments[0])
    return [torch.cat([meeting.tensor for meeting in meetings])] * len(meetings)


def _reduce_scatter(meetings: Sequence[Meeting]) -> Sequence[Tensor]:
    _check_group_size(meetings, meetings[0].arguments[1])
    total = _reduced(meetings)
    length, rest = divmod(total.shape[0], len(meetings))
    if rest:
        raise CollectiveMismatchError(_lines("reduce_scatter of a length that the group does not divide", meetings))
    return [total.narrow(0, length * index, length) for index in range(len(meetings))]


def _all_to_all(meetings: Sequence[Meeting]) -> Sequence[Tensor]:
    counts = [[torch.as_tensor(count).tolist() for count in meeting.arguments] for meeting in meetings]
    sent = [torch.split_with_sizes(meeting.tensor, own[1]) for meeting, own in zip(meetings, counts, strict=True)]
    for index, (coming, _) in enumerate(counts):
        if [pieces[index].shape[0] for pieces in sent] != coming:
            raise CollectiveMismatchError(_lines("members of a group disagree in what is sent", meetings))
    return [torch.cat([pieces[index] for pieces in sent]) for index in range(len(meetings))]


def _broadcast(meetings: Sequence[Meeting]) -> Sequence[Tensor]:
    return [meetings[meetings[0].arguments[0]].tensor] * len(meetings)


_EXCHANGES: dict[Any, tuple[Callable[[Sequence[Meeting]], Sequence[Tensor]], bool]] = {
    _c10d.all_reduce.default: (_all_reduce, True),
    _c10d.all_gather_into_tensor.default: (_all_gather, True),
    _c10d.reduce_scatter_tensor.default: (_reduce_scatter, True),
    _c10d.all_to_all_single.default: (_all_to_all, False),
    _c10d.broadcast.default: (_broadcast, True),
    torch.ops.autopar.all_to_all_rows.default: (_all_to_all, False),
}
